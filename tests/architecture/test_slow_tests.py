"""Tests marked `slow` run under `make test` and stay out of `make test-room`, which finds quick ones in every room."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
WHOLE_FILE = re.compile(r"^pytestmark = (?:\[[^\]]*?)?pytest\.mark\.slow\b", re.M)
ONE_TEST = re.compile(r"^ *@pytest\.mark\.slow\b", re.M)
# Set by a `make` that runs these tests; another one would take them for its own.
OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS", "ROOM", "SLOW", "TEST_PROCESSES")


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("test_*.py"))


def rooms() -> Iterator[str]:
    """Folders of `tests` that hold tests."""
    for folder in sorted(path for path in TESTS.iterdir() if path.is_dir()):
        if files_of(folder):
            yield folder.name


def pytest_arguments(*target: str) -> list[str]:
    """What `make TARGET` calls pytest with."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    command = ["make", "--dry-run", "--silent", *target]
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in shown.splitlines() if " -m pytest " in line)
    return shlex.split(line.partition(" -m pytest ")[2])


def run_by(tmp_path: Path, arguments: list[str]) -> set[str]:
    """Which of two tests, one of them slow, pytest runs with these arguments and the options of the project."""
    (tmp_path / "test_two.py").write_text(
        "import pytest\n\ndef test_quick(): pass\n\n@pytest.mark.slow\ndef test_slow(): pass\n"
    )
    options = [argument for argument in arguments if not argument.startswith("tests/")]
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-v"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *options, "--numprocesses", "0", "test_two.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"::(\w+) PASSED", done.stdout))


def test_make_test_runs_slow_tests(tmp_path: Path) -> None:
    arguments = pytest_arguments("test")
    assert run_by(tmp_path, arguments) == {"test_quick", "test_slow"}
    # no file, folder or expression narrows it further
    assert arguments == ["--numprocesses", "2", "--dist", "loadfile"]


@pytest.mark.parametrize(
    ("switch", "expected"), [((), {"test_quick"}), (("SLOW=1",), {"test_quick", "test_slow"})], ids=["quick", "slow"]
)
def test_make_test_room(switch: tuple[str, ...], expected: set[str], tmp_path: Path) -> None:
    arguments = pytest_arguments("test-room", "ROOM=batch", *switch)
    assert "tests/batch" in arguments
    assert run_by(tmp_path, arguments) == expected


def test_slow_files_are_where_pytest_looks() -> None:
    marked = [path for path in TESTS.rglob("*.py") if WHOLE_FILE.search(path.read_text(encoding="utf-8"))]
    assert marked, "no file is marked slow"
    assert [path for path in marked if path not in files_of(TESTS)] == []


@pytest.mark.parametrize("room", rooms())
def test_a_room_has_quick_tests(room: str) -> None:
    """Else `make test-room` would run none, and fail."""
    quick = [path for path in files_of(TESTS / room) if not WHOLE_FILE.search(path.read_text(encoding="utf-8"))]
    assert any(text.count("\ndef test_") > len(ONE_TEST.findall(text)) for text in map(Path.read_text, quick))
