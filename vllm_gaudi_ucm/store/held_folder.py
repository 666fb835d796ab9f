"""The opened folder of the file store: read and written by descriptor, even if its path changes.

gaudi-ucm-store.json                        marks it as ours
blocks/<bytes of a block>/ab/c/<key>.kv     one record each; ab, c: the key's first three hex digits
tmp/                                        records that are being written, locked by their writer
"""

import errno
import fcntl
import itertools
import json
import os
import re
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.store.base import HEADER_BYTES
from vllm_gaudi_ucm.store.entries import (
    create_file,
    entries,
    folder_below,
    kind_of,
    open_file,
    read_whole,
    remove_file,
    remove_unless_locked,
    write_whole,
)
from vllm_gaudi_ucm.store.medium import REFUSED, StoredBlock

MARKER = "gaudi-ucm-store.json"
_MARK = f"{json.dumps({'format': 1})}\n".encode()


class NotAStoreError(Exception):
    """Raised if the folder has other content; the text tells what was found."""


def is_marked(folder: int) -> bool:
    """True for a store's folder, False for an empty one. Raises NotAStoreError for any other."""
    mark = _read(folder)
    if mark is None:
        names = os.listdir(folder)
        if not names:
            return False
        # another engine may have marked it in the meantime
        mark = _read(folder) if MARKER in names else None
        if mark is None:
            raise NotAStoreError("not the folder of a store")
    if mark.strip() not in (b"", _MARK.strip()):  # empty: another engine is writing it now, or lost power while writing
        raise NotAStoreError(f"made by another version: {mark.decode(errors='replace').strip()!r}")
    return True


def write_mark(folder: int) -> None:
    """Marks the folder permanently; several engines may do so at once."""
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


_MOST = 1000
logger = plugin_logger(__name__)


class Strangers:
    """Entries in a record's place that are not records: never opened, never removed. The first is logged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._met: dict[str, str] = {}

    def meet(self, name: str, mode: int) -> None:
        """Notes a stranger. name: its path below the folder. mode: `st_mode`."""
        if name in self._met or len(self._met) == _MOST:
            return
        if not self._met:
            logger.warning(
                "file store %s: %s is %s in the place of a part of the store; it is not touched, nor are further ones, "
                "which `gaudi-ucm store verify` lists",
                self._folder,
                name,
                kind_of(mode),
            )
        self._met[name] = kind_of(mode)

    def names(self) -> list[str]:
        """Returns the path and type of each."""
        return [f"{self._folder / name} ({kind})" for name, kind in self._met.items()]


BLOCKS, TMP = "blocks", "tmp"
_LEVELS = [re.compile(pattern) for pattern in (r"[1-9][0-9]*", r"[0-9a-f]{2}", r"[0-9a-f]")]
_RECORD = re.compile(r"([0-9a-f]{64})\.kv")
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_GRACE_SECONDS = 5.0  # younger temporary files may not be locked yet by their living writer
_numbers = itertools.count()


class HeldFolder:
    """Descriptors of the folder and of `blocks` in it, closed with the last reference to this object.

    Only the owner can create entries below them. Anything except a file in the place of a record is a stranger:
    look-ups miss it, reads return REFUSED, and writes fail.
    """

    def __init__(self, root: int, blocks: int, opened: ExitStack, strangers: Strangers) -> None:
        """Takes over `opened`, which closes the descriptors."""
        self._root = root
        self._blocks = blocks
        self._strangers = strangers
        self._identity = _identity(os.fstat(blocks))
        weakref.finalize(self, opened.pop_all().close)

    def is_at(self, path: str) -> bool:
        """True if the folder at a path is this one: not removed, moved or replaced."""
        try:
            return _identity(os.stat(f"{path}/{BLOCKS}", follow_symlinks=False)) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            return False

    def mtime(self, block: StoredBlock) -> int | None:
        """Returns the mtime of a block's record in ns, None if there is none."""
        found = self._stat(block)
        return found.st_mtime_ns if found is not None and self._is_record(block, found.st_mode) else None

    def is_whole(self, block: StoredBlock) -> bool:
        """True if the block's record exists in full length."""
        found = self._stat(block)
        return (
            found is not None
            and self._is_record(block, found.st_mode)
            and found.st_size == HEADER_BYTES + block.block_bytes
        )

    def read(self, block: StoredBlock, record: memoryview) -> int | None:
        """Like `Medium.peek`."""
        found = self._stat(block)
        if found is None:
            return None
        if not self._is_record(block, found.st_mode):
            return REFUSED
        try:
            descriptor = open_file(record_name(block), self._blocks)
        except FileNotFoundError:  # removed in the meantime
            return None
        try:
            size = os.fstat(descriptor).st_size
            return read_whole(descriptor, record) if size == len(record) else size
        finally:
            os.close(descriptor)

    def touch(self, block: StoredBlock, now: int) -> None:
        """Sets a record's mtime, in ns."""
        os.utime(record_name(block), ns=(now, now), dir_fd=self._blocks, follow_symlinks=False)

    def put(self, block: StoredBlock, record: memoryview, fsync: bool) -> int:
        """Writes a record to a temporary file and moves it into place; returns its mtime in ns. Errors leave none."""
        name = f"{os.getpid()}-{next(_numbers)}-{time.time_ns()}"
        with folder_below(self._root, TMP, make=True) as tmp:
            try:
                used = _write(name, tmp, record, fsync)
                with folder_below(self._blocks, leaf_name(block), make=True, sync=fsync) as leaf:
                    os.rename(name, _file_name(block), src_dir_fd=tmp, dst_dir_fd=leaf)
            except BaseException:
                with suppress(OSError):  # if it cannot be removed now, it is swept later
                    remove_file(name, tmp)
                raise
            return used

    def sync(self, block: StoredBlock) -> None:
        """Waits until the name of a block's record is on the disk."""
        with folder_below(self._blocks, leaf_name(block)) as leaf:
            os.fsync(leaf)

    def in_the_way(self, block: StoredBlock) -> bool:
        """True if a stranger is in a block's place."""
        found = self._stat(block)
        return found is not None and not self._is_record(block, found.st_mode)

    def remove(self, block: StoredBlock) -> bool:
        """Removes a block's record; True if it existed."""
        found = self._stat(block)
        if found is None or not self._is_record(block, found.st_mode):
            return False
        try:
            with folder_below(self._blocks, leaf_name(block)) as leaf:
                return remove_file(_file_name(block), leaf)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def leaves(self) -> Iterator[tuple[str, int]]:
        """Yields the folders of records, each with its mtime in ns, which changes with its content."""
        for size, _ in self._folders(".", 0):
            for outer, _ in self._folders(size, 1):
                yield from self._folders(outer, 2)

    def records(self, leaf: str) -> list[tuple[StoredBlock, int]]:
        """Yields the blocks in a leaf folder, each with its mtime in ns."""
        size, found = int(leaf.partition("/")[0]), []
        for name, status in self._list(leaf, _RECORD):
            block = StoredBlock(bytes.fromhex(name.removesuffix(".kv")), size)
            if self._is_record(block, status.st_mode):
                found.append((block, status.st_mtime_ns))
        return found

    def sweep(self) -> int:
        """Removes files that dead writers have left in tmp; returns their number."""
        removed = 0
        with suppress(FileNotFoundError), folder_below(self._root, TMP) as tmp:
            for entry in entries(tmp):
                try:
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        self._strangers.meet(f"{TMP}/{entry.name}", status.st_mode)
                    elif time.time() - status.st_mtime > _GRACE_SECONDS:
                        removed += remove_unless_locked(entry.name, tmp)
                except FileNotFoundError:
                    continue  # moved into place, or swept by another engine
        return removed

    def _stat(self, block: StoredBlock) -> os.stat_result | None:
        """Returns the status of the entry in a block's place; None if there is none."""
        try:
            return os.stat(record_name(block), dir_fd=self._blocks, follow_symlinks=False)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise

    def _is_record(self, block: StoredBlock, mode: int) -> bool:
        if stat.S_ISREG(mode):
            return True
        self._strangers.meet(f"{BLOCKS}/{record_name(block)}", mode)
        return False

    def _folders(self, path: str, level: int) -> Iterator[tuple[str, int]]:
        """Yields the folders of one level below another, by their paths, with mtimes in ns."""
        for name, status in self._list(path, _LEVELS[level]):
            inner = name if path == "." else f"{path}/{name}"
            if stat.S_ISDIR(status.st_mode):
                yield inner, status.st_mtime_ns
            else:
                self._strangers.meet(f"{BLOCKS}/{inner}", status.st_mode)

    def _list(self, path: str, names: re.Pattern[str]) -> list[tuple[str, os.stat_result]]:
        """Returns the entries of a folder whose names match; none without a folder."""
        found = []
        with suppress(FileNotFoundError, NotADirectoryError), folder_below(self._blocks, path) as folder:
            for entry in entries(folder):
                if names.fullmatch(entry.name):
                    with suppress(FileNotFoundError):  # it is gone by now
                        found.append((entry.name, entry.stat(follow_symlinks=False)))
        return found


def leaf_name(block: StoredBlock) -> str:
    """Returns the folder of a block's record, below `blocks`."""
    name = block.key[:2].hex()
    return f"{block.block_bytes}/{name[:2]}/{name[2]}"


def record_name(block: StoredBlock) -> str:
    """Returns the path of a block's record, below `blocks`."""
    return f"{leaf_name(block)}/{_file_name(block)}"


def _file_name(block: StoredBlock) -> str:
    return f"{block.key.hex()}.kv"


def _write(name: str, at: int, record: memoryview, fsync: bool) -> int:
    """Writes a new file, locked meanwhile; returns its mtime in ns."""
    descriptor = create_file(name, at)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_whole(descriptor, record)
        if fsync:
            os.fsync(descriptor)
        # The kernel's own stamp is the same for everything within a tick. It is set last, so that no engine takes the
        # file for a dead writer's before its move.
        now = time.time_ns()
        os.utime(descriptor, ns=(now, now))
        return now
    finally:
        os.close(descriptor)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
