"""What set-up prints: a line for each step, the rest in files that an error names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import ROOT

STEP = str(ROOT / "scripts" / "step.sh")
# Of a `make` that runs these tests, and of the user's pip.
LEFT_OUT = ("MAKE", "MFLAGS", "PIP_")


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    return kept | {"PIP_CONFIG_FILE": os.devnull}


def step(log: Path, title: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", STEP, str(log), title, *command], capture_output=True, text=True, timeout=60)


def test_a_step_is_one_line_and_its_output_is_in_the_file(tmp_path: Path) -> None:
    done = step(tmp_path / "logs" / "one.log", "[1/2] first", "bash", "-c", "seq 1000; echo problem >&2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[1/2] first ... ")
    assert done.stdout.count("\n") == 1
    assert (tmp_path / "logs" / "one.log").read_text().splitlines()[1:] == [*map(str, range(1, 1001)), "problem"]


def test_a_step_that_fails_names_its_file_and_shows_its_end(tmp_path: Path) -> None:
    log = tmp_path / "two.log"
    done = step(log, "[2/2] second", "bash", "-c", "seq 1000; exit 7")
    assert done.returncode == 7
    assert "[2/2] second ... failed after" in done.stdout
    assert str(log) in done.stderr
    assert "    1000\n" in done.stderr
    assert "    900\n" not in done.stderr


@pytest.mark.slow  # makes a virtual environment
def test_a_set_up_that_fails_names_the_file_of_its_step(tmp_path: Path) -> None:
    """pip finds no torch: no index, in an environment of its own."""
    variables = (f"VENV={tmp_path / 'venv'}", f"LOGS={tmp_path / 'logs'}", "TORCH_ARGS=--no-index")
    command = ["make", "--silent", f"PYTHON={sys.executable}", *variables, "setup"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines[0] == "[1/6] virtual environment"
    assert "torch" in lines[1]
    assert "failed after" in lines[1]
    log = tmp_path / "logs" / "setup-2-torch.log"
    assert str(log) in done.stderr
    # what pip says, whatever its release
    assert "    ERROR: " in done.stderr
    assert re.search(r"ERROR: .*torch==", log.read_text())
