"""The file that marks a folder as a store's: written before anything else, so that no engine takes it for another's."""

from __future__ import annotations

import json
import os
import stat

from vllm_gaudi_ucm.store.entries import kind_of, open_file

MARKER = "gaudi-ucm-store.json"
_MARK = f"{json.dumps({'format': 1})}\n".encode()


class NotAStoreError(Exception):
    """The folder holds something else; the text says what was found."""


def is_marked(folder: int) -> bool:
    """True for a store's folder, False for an empty one. Raises NotAStoreError for any other."""
    mark = _read(folder)
    if mark is None:
        names = os.listdir(folder)
        if not names:
            return False
        # another engine may have marked it since
        mark = _read(folder) if MARKER in names else None
        if mark is None:
            raise NotAStoreError("not the folder of a store")
    if mark.strip() not in (b"", _MARK.strip()):  # empty: another engine is just writing it, or lost power then
        raise NotAStoreError(f"made by another version: {mark.decode(errors='replace').strip()!r}")
    return True


def write_mark(folder: int) -> None:
    """Marks the folder, for good; several engines may do so at once."""
    if _read(folder) == _MARK:
        return
    descriptor = open_file(MARKER, folder, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, _MARK, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.fsync(folder)


def _read(folder: int) -> bytes | None:
    try:
        mode = os.stat(MARKER, dir_fd=folder, follow_symlinks=False).st_mode
        if not stat.S_ISREG(mode):
            raise NotAStoreError(f"{MARKER} in it is {kind_of(mode)}")
        descriptor = open_file(MARKER, folder)
    except FileNotFoundError:
        return None
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
