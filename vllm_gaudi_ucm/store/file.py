"""The store `file`: content-addressed records in a folder, bounded, shared by several engines.

Every process keeps an index of the folder, and every few seconds lists the parts that others changed. So the bound may
be exceeded by what the others write in between. Order of use is kept in the files' mtime: it survives restarts, and one
engine does not evict blocks that another has just used.
"""

import errno
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.options.errors import NOTE, Problem, UcmConfigError
from vllm_gaudi_ucm.options.values import BYTES_NOTE, ByteSize, show_bytes
from vllm_gaudi_ucm.store.base import HEADER_BYTES, Finding
from vllm_gaudi_ucm.store.folder import Folder, FolderIndex, FolderListing
from vllm_gaudi_ucm.store.guarded import MediumStore
from vllm_gaudi_ucm.store.held_folder import HeldFolder, leaf_name
from vllm_gaudi_ucm.store.medium import Collected, FullError, Medium, MediumOptions, RefusedError, StoredBlock, Usage

logger = plugin_logger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_TURNS = 256


class FileStoreOptions(MediumOptions):
    """Files in a folder, best on a local NVMe; several engines may use one folder."""

    kind: Literal["file"] = Field(default="file", description="Blocks in files.")
    path: Path = Field(
        strict=False,
        description="Folder, made with mode 0700 unless it exists.",
        json_schema_extra={NOTE: "here of a folder"},
    )
    capacity: ByteSize = Field(
        default=32 << 30,
        description="Most bytes of blocks in the folder; the least recently used leave first.",
        json_schema_extra={NOTE: BYTES_NOTE},
    )
    max_age: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Seconds since its last use after which a block is removed. Without it only `capacity` bounds.",
    )
    fsync: bool = Field(
        default=True,
        description="Wait until a block is on the disk before it counts as saved. Without it a power cut can lose "
        "blocks that were saved; what is damaged is found by its checksum either way.",
    )

    @field_validator("path")
    @classmethod
    def _whole_path(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @property
    def most_bytes(self) -> int:
        return self.capacity


class FileMedium(Medium):
    """Records in a folder, `capacity` bytes of blocks at most.

    evicts: whether the least recently used blocks make room for a new one; if not, the new one is refused. max_age: see
    `FileStoreOptions`; ignored without `evicts`, because such blocks are needed.
    """

    kind = "file"
    upkeep_seconds = 5.0
    batch_bytes = 4 << 20

    def __init__(
        self, folder: Folder, capacity: int, fsync: bool, evicts: bool = True, max_age: float | None = None
    ) -> None:
        self._folder = folder
        self._evicts = evicts
        self._capacity = capacity
        self._fsync = fsync
        self._max_age = max_age if evicts else None
        # Operations on one block are serialised, so that the index agrees with the disk.
        self._turns = [threading.Lock() for _ in range(_TURNS)]
        self._lock = threading.Lock()  # for all below; never held during disk access
        self._index = FolderIndex()
        self._reserved = 0  # bytes of blocks that are being written
        self._listing = FolderListing(folder, self._index, self._lock)

    def place(self) -> str:
        return f"file store {self._folder.path}"

    @property
    def reserved(self) -> int:
        """Returns the bytes of blocks that are being written now."""
        with self._lock:
            return self._reserved

    def lookup(self, keys: Sequence[bytes], block_bytes: int) -> list[bool]:
        held = self._folder.hold()
        return [held is not None and held.is_whole(StoredBlock(key, block_bytes)) for key in keys]

    def keep(self, key: bytes, block_bytes: int) -> bool:
        held, block = self._folder.hold(), StoredBlock(key, block_bytes)
        return held is not None and held.is_whole(block) and self._use(held, block)

    def read(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        held, block = self._folder.hold(), StoredBlock(key, block_bytes)
        if held is None:
            return None
        size = held.read(block, record)
        if size == len(record):
            self._use(held, block)
        return size

    def peek(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        held = self._folder.hold()
        return None if held is None else held.read(StoredBlock(key, block_bytes), record)

    def strangers(self) -> list[str]:
        return self._folder.strangers.names()

    def write(self, key: bytes, record: memoryview) -> bool:
        held, block = self._folder.hold_or_make(), StoredBlock(key, len(record) - HEADER_BYTES)
        reserved = block.block_bytes
        with self._lock:
            self._reserved += reserved
        try:
            with _refusals():
                if not self._make_room(reserved):
                    raise FullError(f"no block may be evicted from its {self._capacity} bytes to make room for another")
                with self._turn(block):
                    if held.is_whole(block):
                        return False
                    used = self._put(held, block, record)
                    with self._lock:  # at once, so that neither too much is reserved, nor too much evicted
                        self._index.use(block, leaf_name(block), used)
                        self._reserved -= reserved
                        reserved = 0
                    if self._fsync:
                        held.sync(block)
            return True
        finally:
            with self._lock:
                self._reserved -= reserved

    def use(self, keys: Sequence[bytes], block_bytes: int) -> None:
        for key in reversed(keys):
            self.keep(key, block_bytes)

    def _put(self, held: HeldFolder, block: StoredBlock, record: memoryview) -> int:
        if held.in_the_way(block):
            raise RefusedError(f"another entry is in the place of block {block.key.hex()}")
        return held.put(block, record, self._fsync)

    def delete(self, blocks: Sequence[StoredBlock]) -> int:
        removed = 0
        for block in blocks:
            with self._turn(block):
                removed += self._remove(block)
        return removed

    def blocks(self, block_bytes: int | None = None) -> Iterator[StoredBlock]:
        held = self._folder.hold()
        if held is None:
            return
        for leaf, _ in held.leaves():
            for block, _ in held.records(leaf):
                if block_bytes is None or block.block_bytes == block_bytes:
                    yield block

    def usage(self, block_bytes: int) -> Usage:
        with self._lock:
            return Usage(len(self._index), self._index.bytes, self._capacity)

    def upkeep(self) -> None:
        """Lists what others changed, evicts blocks that are old or beyond the bound, removes files of dead writers."""
        self._listing.refresh()
        self._shrink(None, self._max_age)
        self._make_room(0)
        held = self._folder.hold()
        if held is not None:
            held.sweep()

    def collect(self, most_bytes: int | None, max_age: float | None) -> Collected:
        self._listing.refresh()
        return self._shrink(most_bytes, max_age)

    def _shrink(self, most_bytes: int | None, max_age: float | None) -> Collected:
        """Evicts the oldest blocks until the index has `most_bytes`, and none that is older than `max_age` seconds."""
        blocks = size = 0
        while True:
            with self._lock:
                oldest, held = self._index.oldest(), self._index.bytes
            if oldest is None:
                break
            is_old = max_age is not None and oldest[1] < time.time_ns() - max_age * 1e9
            if not is_old and (most_bytes is None or held <= most_bytes):
                break
            if self._evict(*oldest):
                blocks, size = blocks + 1, size + oldest[0].block_bytes
        return Collected(blocks, size)

    def check_integrity(self) -> None:
        with self._lock:
            self._index.check_integrity()
            assert self._reserved >= 0

    def close(self) -> None:
        self._folder.close()

    def _turn(self, block: StoredBlock) -> threading.Lock:
        return self._turns[block.key[0] % _TURNS]

    def _use(self, held: HeldFolder, block: StoredBlock) -> bool:
        """Makes a block the newest, unless it is gone. If the disk does not record it, only this process knows."""
        with self._turn(block):
            now = time.time_ns()
            try:
                held.touch(block, now)
            except FileNotFoundError:
                return False
            except OSError as error:
                self._say_untouched(error)
            with self._lock:
                self._index.use(block, leaf_name(block), now)
            return True

    def _say_untouched(self, error: OSError) -> None:
        with self._lock:
            self.untouched += 1
            is_first = self.untouched == 1
        if is_first:
            what = "a block could not be marked as used (logged once)"
            logger.warning("%s: %s: %s", self.place(), what, str(error))

    def _remove(self, block: StoredBlock) -> bool:
        held = self._folder.hold()
        removed = held is not None and held.remove(block)
        with self._lock:
            self._index.drop(block)
        return removed

    def _make_room(self, size: int) -> bool:
        """Evicts until the index and the blocks being written fit; False if a write of `size` would never fit."""
        while True:
            with self._lock:
                oldest = self._index.oldest()
                if self._index.bytes + self._reserved <= self._capacity:
                    return True
                if oldest is None or not self._evicts or (size and self._reserved > self._capacity):
                    return False
            self._evict(*oldest)

    def _evict(self, block: StoredBlock, used: int) -> bool:
        """Removes a block, unless it was used after `used`; True if it was there."""
        with self._turn(block):
            held = self._folder.hold()
            mtime = None if held is None else held.mtime(block)
            if mtime is not None and mtime > used:
                with self._lock:
                    self._index.use(block, leaf_name(block), mtime)
                return False
            removed = self._remove(block)
            with self._lock:
                self.evictions += removed
            return removed


@contextmanager
def _refusals() -> Iterator[None]:
    """Translates errors of a folder that can be read but not written to."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL + _READ_ONLY:
            raise FullError(error.errno, error.strerror) from error
        if error.errno in _IN_THE_WAY:
            raise RefusedError(error.errno, error.strerror) from error
        raise


class FileStore(MediumStore):
    """Blocks in the files of a folder."""

    Options = FileStoreOptions
    advice = "see whether the folder's disk answers, has room and may be written by this user"

    @classmethod
    def open_medium(cls, options: FileStoreOptions, create: bool = True, evicts: bool = True) -> FileMedium:
        """Raises UcmConfigError for a folder that cannot be used."""
        try:
            return FileMedium(Folder(options.path, create), options.capacity, options.fsync, evicts, options.max_age)
        except OSError as error:
            found = f"{options.path} ({error.strerror})"
            expected = "a folder that this user owns, or may make"
            raise UcmConfigError([Problem("store.path", found, expected)]) from error

    @classmethod
    def findings(cls, options: FileStoreOptions) -> Iterator[Finding]:
        free = shutil.disk_usage(options.path).free
        medium = cls.open_medium(options)
        held = sum(block.block_bytes for block in medium.blocks())
        medium.close()
        is_enough = free + held >= options.capacity
        found = f"{show_bytes(free)} free, {show_bytes(held)} in the store"
        expected = f"room for store.capacity, {show_bytes(options.capacity)}"
        advice = "" if is_enough else "lower store.capacity: on a full disk blocks are not saved"
        yield Finding("disk", is_enough, found, expected, advice)
