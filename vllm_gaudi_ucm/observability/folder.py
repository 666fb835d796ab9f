"""The private folder through which one engine's metrics pass from the worker's process to the API server's."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path


def metrics_folder(instance_id: str) -> Path:
    """The folder of an engine, from vLLM's `instance_id`: equal in all its processes, and different between servers.

    vLLM appends `_dp<rank>` to the id of a data-parallel engine in that engine's own process; such engines share one
    folder, in which each has files of its own.
    """
    name = re.sub(r"\W", "_", re.sub(r"_dp\d+$", "", instance_id))
    return Path(tempfile.gettempdir()) / f"gaudi-ucm-metrics-{name}"


def make_private(folder: Path) -> None:
    """Make the folder, for this user alone.

    Raises PermissionError where it is there already and others could write to it, OSError where it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not is_private(folder):
            raise PermissionError(
                f"{folder} is not a folder of this user alone (mode 0700); remove it, or set TMPDIR to another folder"
            ) from None


def is_private(folder: Path) -> bool:
    """Whether it is a folder, not a link, that only this user can read and write. The temp folder is everybody's."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def remove_files(folder: Path, engine: str = "*") -> None:
    """Remove the files of one engine (or of all), and the folder with the last of them; safe to call twice."""
    if not is_private(folder):
        return
    for file in folder.glob(f"*_{engine}.db"):
        file.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
