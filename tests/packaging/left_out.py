"""Copies of the package in which something is left out, and their tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.packaging.source_tree import PACKAGE, ROOMS, ROOT


def copy_installed(target: Path) -> Path:
    """Copies the package in its installed shape, and its tests."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / PACKAGE, target / PACKAGE, ignore=ignored)
    for room in ROOMS:
        shutil.copytree(ROOT / room, target / PACKAGE / room, ignore=ignored)
    # the tests' configuration imports the developer tools
    tools = "vllm_gaudi_ucm_tools"
    shutil.copytree(ROOT / "tools" / tools, target / tools, ignore=ignored)
    shutil.copytree(ROOT / "tests", target / "tests", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", target)
    (target / ".cache").symlink_to(ROOT / ".cache")
    return target


def environment(copy: Path) -> dict[str, str]:
    """Variables of a process that imports the package from a copy."""
    return {**os.environ, "PYTHONPATH": str(copy)}


def run_tests(python: Path, copy: Path, *files: str, **variables: str) -> None:
    """Runs the quick tests of these files, which must pass, and not all be skipped."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files]
    variables = {**environment(copy), **variables}
    done = subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
