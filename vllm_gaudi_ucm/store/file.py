"""The medium of the file store: content-addressed records in a folder, bounded, shared by several engines.

Every process keeps an index of the folder and looks at the parts that others changed every few seconds, so the bound
holds to within what the others write meanwhile. Order of use is kept in the files' mtime: it survives restarts, and one
engine does not evict what another has just used.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence

from vllm_gaudi_ucm.store.entries import open_file, read_whole
from vllm_gaudi_ucm.store.folder import Folder
from vllm_gaudi_ucm.store.folder_index import FolderIndex
from vllm_gaudi_ucm.store.folder_listing import FolderListing
from vllm_gaudi_ucm.store.medium import FullError, Medium, StoredBlock, Usage
from vllm_gaudi_ucm.store.record import HEADER_BYTES

_TURNS = 256


class FileMedium(Medium):
    """Records in a folder, `capacity` bytes of blocks at most.

    evicts: whether the least recently used blocks make room for a new one; if not, there is none.
    """

    kind = "file"
    upkeep_seconds = 5.0
    batch_bytes = 4 << 20

    def __init__(self, folder: Folder, capacity: int, fsync: bool, evicts: bool = True) -> None:
        self._folder = folder
        self._evicts = evicts
        self._capacity = capacity
        self._fsync = fsync
        # What happens to one block happens in turn, so that the index says of it what the disk says.
        self._turns = [threading.Lock() for _ in range(_TURNS)]
        self._lock = threading.Lock()  # of all below; never held while the disk is asked
        self._index = FolderIndex()
        self._reserved = 0  # bytes of blocks that are being written
        self._listing = FolderListing(folder, self._index, self._lock)

    def place(self) -> str:
        return f"file store {self._folder.path}"

    def lookup(self, keys: Sequence[bytes], block_bytes: int) -> list[bool]:
        return [self._is_whole(StoredBlock(key, block_bytes)) for key in keys]

    def keep(self, key: bytes, block_bytes: int) -> bool:
        block = StoredBlock(key, block_bytes)
        return self._is_whole(block) and self._use(block)

    def read(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        block = StoredBlock(key, block_bytes)
        try:
            descriptor = open_file(self._folder.file(block))
        except FileNotFoundError:
            return None
        try:
            size = os.fstat(descriptor).st_size
            if size == len(record):
                size = read_whole(descriptor, record)
                self._use(block)
            return size
        finally:
            os.close(descriptor)

    def write(self, key: bytes, record: memoryview) -> bool:
        block = StoredBlock(key, len(record) - HEADER_BYTES)
        self._reserve(block.block_bytes)
        used = None
        with self._turn(block):
            try:
                if self._is_whole(block):
                    return False
                used = self._folder.put(block, record, self._fsync)
                return True
            finally:
                with self._lock:
                    self._reserved -= block.block_bytes
                    if used is not None:
                        self._index.use(block, self._folder.leaf(block), used)

    def delete(self, blocks: Sequence[StoredBlock]) -> int:
        removed = 0
        for block in blocks:
            with self._turn(block):
                removed += self._remove(block)
        return removed

    def blocks(self, block_bytes: int | None = None) -> Iterator[StoredBlock]:
        for leaf, _ in self._folder.leaves():
            for block, _ in self._folder.records(leaf):
                if block_bytes is None or block.block_bytes == block_bytes:
                    yield block

    def usage(self, block_bytes: int) -> Usage:
        with self._lock:
            return Usage(len(self._index), self._index.bytes, self._capacity)

    def upkeep(self) -> None:
        """Looks at what others changed, evicts what is too much, and removes what dead writers left."""
        self._listing.refresh()
        self._make_room(0)
        self._folder.sweep()

    def check_integrity(self) -> None:
        with self._lock:
            self._index.check_integrity()
            assert self._reserved >= 0

    def close(self) -> None:
        """Nothing is open between calls."""

    def _is_whole(self, block: StoredBlock) -> bool:
        try:
            return os.stat(self._folder.file(block)).st_size == HEADER_BYTES + block.block_bytes
        except FileNotFoundError:
            return False

    def _turn(self, block: StoredBlock) -> threading.Lock:
        return self._turns[block.key[0] % _TURNS]

    def _use(self, block: StoredBlock) -> bool:
        """Makes a block the newest, unless it has gone."""
        with self._turn(block):
            now = time.time_ns()
            try:
                os.utime(self._folder.file(block), ns=(now, now), follow_symlinks=False)
            except FileNotFoundError:
                return False
            with self._lock:
                self._index.use(block, self._folder.leaf(block), now)
            return True

    def _remove(self, block: StoredBlock) -> bool:
        removed = self._folder.remove(block)
        with self._lock:
            self._index.drop(block)
        return removed

    def _reserve(self, size: int) -> None:
        with self._lock:
            self._reserved += size
        if not self._make_room(size):
            with self._lock:
                self._reserved -= size
            raise FullError(f"no block may leave its {self._capacity} bytes now to make room for another")

    def _make_room(self, size: int) -> bool:
        """Evicts until the index and what is being written fit; False where a write of `size` never would."""
        while True:
            with self._lock:
                oldest = self._index.oldest()
                if self._index.bytes + self._reserved <= self._capacity:
                    return True
                if oldest is None or not self._evicts or (size and self._reserved > self._capacity):
                    return False
            self._evict(*oldest)

    def _evict(self, block: StoredBlock, used: int) -> None:
        """Removes a block, unless someone has used it since `used`."""
        with self._turn(block):
            try:
                mtime = os.stat(self._folder.file(block), follow_symlinks=False).st_mtime_ns
            except FileNotFoundError:
                mtime = used
            if mtime > used:
                with self._lock:
                    self._index.use(block, self._folder.leaf(block), mtime)
                return
            removed = self._remove(block)
            with self._lock:
                self.evictions += removed
