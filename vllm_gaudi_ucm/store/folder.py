"""The folder of the file store: where things lie in it, and that nobody but its owner may read it.

gaudi-ucm-store.json                        marks it as ours
blocks/<bytes of a block>/ab/c/<key>.kv     one record each; ab, c: the key's first three hex digits
tmp/                                        records that are being written, locked by their writer
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.store.entries import (
    PRIVATE_FOLDER,
    create_file,
    entries,
    folders,
    make_folder,
    move_file,
    remove_file,
    remove_unless_locked,
    write_whole,
)
from vllm_gaudi_ucm.store.medium import FullError, StoredBlock

MARKER = "gaudi-ucm-store.json"
_MARK = json.dumps({"format": 1})
_SUFFIX = ".kv"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GRACE_SECONDS = 5.0  # between making a temporary file and locking it nobody may take it for a dead writer's


class Folder:
    """One folder. Opening makes it (`create`), or takes one that a store has made or that is empty.

    Raises `UcmConfigError` for a folder of something else, OSError where it cannot be made or is somebody else's.
    """

    def __init__(self, path: Path, create: bool = True) -> None:
        self.path = path
        self._blocks, self._tmp = str(path / "blocks"), str(path / "tmp")
        self._numbers = itertools.count()
        if create:
            make_folder(str(path))
        _check(path, create)
        if create:
            path.chmod(PRIVATE_FOLDER)
            self._prepare()

    def leaf(self, block: StoredBlock) -> str:
        """The path of the folder that a block's record lies in."""
        name = block.key[:2].hex()
        return f"{self._blocks}/{block.block_bytes}/{name[:2]}/{name[2]}"

    def file(self, block: StoredBlock) -> str:
        """The path of a block's record."""
        return f"{self.leaf(block)}/{block.key.hex()}{_SUFFIX}"

    def put(self, block: StoredBlock, record: memoryview, fsync: bool) -> int:
        """Writes a record beside and moves it into place; its mtime in ns. Raises FullError where there is no room."""
        temporary = f"{self._tmp}/{os.getpid()}-{next(self._numbers)}-{time.time_ns()}"
        try:
            descriptor = self._create(temporary)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_whole(descriptor, record)
                # the kernel's own stamp is the same for all that happens within a tick
                now = time.time_ns()
                os.utime(descriptor, ns=(now, now))
                if fsync:
                    os.fsync(descriptor)
                move_file(temporary, self.file(block))
                return now
            finally:
                os.close(descriptor)
        except OSError as error:
            remove_file(temporary)
            if error.errno in _FULL:
                raise FullError(error.errno, error.strerror) from error
            raise

    def remove(self, block: StoredBlock) -> bool:
        """Whether it was there."""
        return remove_file(self.file(block))

    def leaves(self) -> Iterator[tuple[str, int]]:
        """The folders that records lie in, each with its mtime in ns, which changes with what it holds."""
        for size in folders(self._blocks):
            if size.name.isdigit():
                for outer in folders(size.path):
                    for leaf in folders(outer.path):
                        yield leaf.path, os.stat(leaf.path, follow_symlinks=False).st_mtime_ns

    def records(self, leaf: str) -> Iterator[tuple[StoredBlock, int]]:
        """The blocks in such a folder, each with its mtime in ns."""
        size = int(Path(leaf).parts[-3])
        for entry in entries(leaf):
            name = entry.name.removesuffix(_SUFFIX)
            if len(name) == 64 and entry.name.endswith(_SUFFIX):
                try:
                    yield StoredBlock(bytes.fromhex(name), size), entry.stat(follow_symlinks=False).st_mtime_ns
                except (FileNotFoundError, ValueError):
                    continue  # it has gone, or is no key

    def sweep(self) -> int:
        """Removes what writers that died have left in tmp; how many files."""
        removed = 0
        for entry in entries(self._tmp):
            try:
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _GRACE_SECONDS:
                    removed += remove_unless_locked(entry.path)
            except FileNotFoundError:
                continue  # moved into place, or swept by another engine
        return removed

    def _create(self, path: str) -> int:
        try:
            return create_file(path)
        except FileNotFoundError:  # somebody removed the whole folder meanwhile
            self._prepare()
            return create_file(path)

    def _prepare(self) -> None:
        # the marker first: another engine that opens the folder now must not take it for somebody else's
        make_folder(str(self.path))
        try:
            descriptor = create_file(str(self.path / MARKER))
        except FileExistsError:
            pass
        else:
            with os.fdopen(descriptor, "w") as marker:
                marker.write(f"{_MARK}\n")
        make_folder(self._tmp)
        make_folder(self._blocks)


def _check(path: Path, create: bool) -> None:
    marker = path / MARKER
    if not path.is_dir():
        raise _unusable(path, "no folder", "the folder of a file store")
    if marker.exists():
        text = marker.read_text(errors="replace").strip()
        if text and text != _MARK:  # empty: another engine is just writing it
            raise _unusable(path, f"made by another version: {text!r}", "a store of this version, or another folder")
    elif not create or any(path.iterdir()):
        wanted = "a new or empty folder, or one that a store has made" if create else f"the file {MARKER} in it"
        raise _unusable(path, "not the folder of a store", wanted)


def _unusable(path: Path, what: str, wanted: str) -> UcmConfigError:
    return UcmConfigError([Problem("store.path", f"{path} ({what})", wanted)])
