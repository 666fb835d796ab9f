"""A place of its own for the copies of one engine, in a folder that several may name."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.store.entries import create_file, entries, make_folder, open_file, remove_file

_ENGINES = "engines"
_LOCK = ".lock"
_NAME = re.compile("[0-9a-f]{16}")

logger = plugin_logger(__name__)


class CopyFolder:
    """The folder `engines/<number>` under `root`, and beside it a file that this process has locked.

    Copies are of use to the engine that made them only, and as long as it lives. Making one removes what engines have
    left that were killed: the system has ended their locks.

    Raises OSError where nothing can be made in `root`, an existing folder.
    """

    def __init__(self, root: Path) -> None:
        engines = root / _ENGINES
        make_folder(str(engines))
        _sweep(engines)
        self.path, self._lock = _claim(engines)
        make_folder(str(self.path))

    def remove(self) -> None:
        """Removes all that is in it; a second call does nothing."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


def _claim(engines: Path) -> tuple[Path, int | None]:
    """A place that nobody has, and the descriptor of its lock."""
    while True:
        path = engines / secrets.token_hex(8)
        lock = create_file(f"{path}{_LOCK}")
        # an engine that starts now may have taken the file for one that was left, and removed it or be about to
        if _try_lock(lock) and os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)


def _sweep(engines: Path) -> None:
    """Removes the places of engines that do not live any more."""
    names = {entry.name.removesuffix(_LOCK) for entry in entries(str(engines))}
    for name in filter(_NAME.fullmatch, names):
        path = engines / name
        try:
            lock = open_file(f"{path}{_LOCK}")
        except FileNotFoundError:
            # the lock is there before the folder, and goes after it
            _remove(path)
            continue
        if _try_lock(lock):
            logger.info("memory mode: removes the copies of an engine that has ended, %s", path)
            _remove(path)
        os.close(lock)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(path: Path) -> None:
    """What cannot be removed takes room on the disk, and nothing else: nobody looks for it."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass  # another engine that starts has done it
    except OSError as error:
        logger.warning("memory mode: %s cannot be removed: %s", path, error.strerror)
    remove_file(f"{path}{_LOCK}")
