"""A clean copy of what the distribution is built from, and the modules it must install."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "vllm_gaudi_ucm"
ROOMS = ("ops", "graphs")
BUILD_INPUTS = ("setup.py", "pyproject.toml", "LICENSE", "THIRD_PARTY_NOTICES.md", "MANIFEST.in", "README.md")


def copy_source(target: Path) -> Path:
    """Copy the build's inputs: building in the repository would leave `build/` there, and reuse what lay in it."""
    target.mkdir(parents=True)
    for name in BUILD_INPUTS:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target / name)
    for folder in (PACKAGE, *ROOMS, "tools"):
        shutil.copytree(
            ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        )
    return target


def installed_files(source: Path) -> set[str]:
    """Paths that an install must hold, as the wheel names them: every Python file of the package and of the rooms."""
    files = {str(path.relative_to(source)) for path in (source / PACKAGE).rglob("*.py")}
    for room in ROOMS:
        files |= {f"{PACKAGE}/{path.relative_to(source)}" for path in (source / room).rglob("*.py")}
    return files


def run_python(
    *arguments: str, cwd: Path, python: str | Path = sys.executable, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter away from the repository: -I leaves out the working directory and PYTHONPATH."""
    return subprocess.run(
        [str(python), "-I", *arguments], cwd=cwd, env=env, check=False, capture_output=True, text=True, timeout=240
    )


def pip(*arguments: str, cwd: Path, python: str | Path = sys.executable, env: Mapping[str, str] | None = None) -> str:
    """Run pip, which must succeed, and return what it printed."""
    result = run_python("-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd, python=python, env=env)
    assert result.returncode == 0, f"pip {' '.join(arguments)}:\n{result.stdout}\n{result.stderr}"
    return result.stdout
