"""The interpreter that `make setup` takes: the first on PATH, unless another build of its version is clearly faster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import ROOT

pytestmark = pytest.mark.slow  # times interpreters
NAME = f"python{sys.version_info[0]}.{sys.version_info[1]}"
SLOW = "sys.setprofile(lambda *event: None)"


def build(folder: Path, at_start: str = "") -> Path:
    """An interpreter in a folder of its own, which runs this when it starts."""
    folder.mkdir()
    name, real = folder / NAME, Path(sys.executable).resolve()
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(name)!r}\n{at_start}\n")
    name.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{real}" "$@"\n')
    name.chmod(0o755)
    return name


def pick(*builds: Path, wanted: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((*(str(name.parent) for name in builds), "/usr/bin", "/bin"))
    command = ["bash", str(ROOT / "scripts/pick_python.sh"), wanted]
    return subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)


def test_a_faster_build_further_down_is_taken(tmp_path: Path) -> None:
    """Folders have spaces."""
    slow, plain = build(tmp_path / "a slow one", SLOW), build(tmp_path / "a plain one")
    found = pick(slow, plain)
    assert found.returncode == 0, found.stderr
    assert found.stdout != f"{slow}\n"
    assert f"% of the time of {slow} (PYTHON= chooses another)" in found.stderr
    assert pick(slow, plain, wanted=str(slow)).stdout == f"{slow}\n"


def test_a_slower_build_further_down_is_not(tmp_path: Path) -> None:
    plain, slow = build(tmp_path / "plain"), build(tmp_path / "slow", SLOW)
    found = pick(plain, slow)
    assert slow not in map(Path, found.stdout.splitlines())
    assert str(slow) not in found.stderr


def test_what_does_not_run_or_has_no_venv_is_passed_over(tmp_path: Path) -> None:
    """A version manager's shim is there for versions that are not."""
    shim, bare = build(tmp_path / "shim"), build(tmp_path / "bare", "sys.modules['ensurepip'] = None")
    shim.write_text("#!/bin/sh\nexit 127\n")
    plain = build(tmp_path / "plain")
    assert Path(pick(bare, shim, plain).stdout.strip()) not in (shim, bare)


def test_other_versions_are_refused(tmp_path: Path) -> None:
    old = build(tmp_path / "old", "sys.version_info = (3, 10, 0, 'final', 0)")
    found = pick(wanted=str(old))
    assert found.returncode == 1
    assert f"error: PYTHON={old} is Python 3." in found.stderr
    assert "expected Python 3.11 or 3.12" in found.stderr
    assert "PYTHON=nothing does not exist" in pick(wanted="nothing").stderr
