"""The private folder through which one engine's metrics pass from the worker's process to the API server's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from pathlib import Path

from vllm_gaudi_ucm.private_folder import PRIVATE, is_private

PREFIX = "gaudi-ucm-metrics-"
# Held by every engine that writes to the folder, until its process ends, however it does.
LOCK = "lock"


def metrics_folder(instance_id: str) -> Path:
    """The folder of an engine, from vLLM's `instance_id`: equal in all its processes, and different between servers.

    vLLM appends `_dp<rank>` to the id of a data-parallel engine in that engine's own process; such engines share one
    folder, in which each has files of its own.
    """
    name = re.sub(r"\W", "_", re.sub(r"_dp\d+$", "", instance_id))
    return Path(tempfile.gettempdir()) / f"{PREFIX}{name}"


def make_private(folder: Path) -> None:
    """Make the folder, for this user alone.

    Raises PermissionError where it is there already and others could write to it, OSError where it cannot be made.
    """
    try:
        folder.mkdir(PRIVATE)
    except FileExistsError:
        if not is_private(folder):
            raise PermissionError(
                f"{folder} is not a folder of this user alone (mode 0700); remove it, or set TMPDIR to another folder"
            ) from None


def hold_private(folder: Path) -> int:
    """Make the folder, and hold it: a descriptor, which lets go of it when it is closed. Raises as `make_private`."""
    while True:
        make_private(folder)
        # an engine that starts may take it for a dead one's until it is held
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock).st_nlink:
                return lock
            os.close(lock)


def remove_stale() -> None:
    """Remove the folders of this user's engines that were killed together with their servers."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if is_private(folder):
            # gone meanwhile, held by a living engine, or one that is just being made
            with contextlib.suppress(OSError):
                _remove_unless_held(folder)


def _remove_unless_held(folder: Path) -> None:
    """Raises BlockingIOError where an engine holds it, FileNotFoundError where it never was held."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_files(folder)
    finally:
        os.close(lock)


def remove_files(folder: Path, engine: str = "*") -> None:
    """Remove the files of one engine (or of all), and the folder with the last of them; safe to call twice."""
    if not is_private(folder):
        return
    for file in folder.glob(f"*_{engine}.db"):
        file.unlink(missing_ok=True)
    if folder.is_dir() and {file.name for file in folder.iterdir()} <= {LOCK}:
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()
