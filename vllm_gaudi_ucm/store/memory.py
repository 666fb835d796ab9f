"""The store `memory`: blocks in host memory of this process, bounded in bytes; the least recently used leave first."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.options.errors import NOTE, Problem, UcmConfigError
from vllm_gaudi_ucm.options.values import BYTES_NOTE, ByteSize
from vllm_gaudi_ucm.store.base import (
    ConfiguredStore,
    Counts,
    KvStore,
    StoreOptions,
    StoreStats,
    block_view,
    check_block_bytes,
    check_keys,
)
from vllm_gaudi_ucm.store.records import can_pin
from vllm_gaudi_ucm.store.slot_pool import SlotPool


class MemoryStoreOptions(StoreOptions):
    """Options of a store in host memory of the engine's process, which ends with it."""

    ends_with_process = True

    kind: Literal["memory"] = Field(default="memory", description="Blocks in host memory.")
    capacity: ByteSize = Field(
        default=4 << 30,
        description="Most bytes of blocks; the least recently used leave first. Taken from the system as they fill, "
        "page-locked memory at start.",
        json_schema_extra={NOTE: BYTES_NOTE},
    )
    pin: Literal["auto"] | bool = Field(
        default="auto", description="Page-locked memory. `auto`: where torch finds a CUDA device or a Gaudi."
    )

    @property
    def most_bytes(self) -> int:
        return self.capacity


@dataclass
class HeldBlock:
    """A block of the store. view: read-only view of its slot. readers: current loans."""

    slot: int
    view: memoryview
    readers: int = 0
    removed: bool = False
    """True if it was removed while lent: the last reader then returns its slot."""


class MemoryLoan:
    """A context for one use of a block; small, because copies around it evict the processor's caches."""

    __slots__ = ("_begin", "_entry", "_pool", "_store")

    def __init__(self, store: MemoryStore, entry: HeldBlock, pool: SlotPool) -> None:
        self._store = store
        self._entry = entry
        self._pool = pool
        self._begin = time.perf_counter()

    def __enter__(self) -> memoryview:
        return self._entry.view

    def __exit__(self, *exception: object) -> None:
        self._store.end_read(self._entry, self._pool, time.perf_counter() - self._begin)


logger = plugin_logger(__name__)


class MemoryStore(KvStore):
    """Blocks of `block_bytes` bytes; `capacity` bytes at most. Copies run outside the lock, several at once.

    evicts: whether the least recently used block makes room for a new one; if not, the new one is not saved.
    """

    waits = False
    batch_bytes = 8 << 20  # a millisecond of copying, compared with which a thread switch costs little

    def __init__(self, block_bytes: int, capacity: int, pinned: bool = False, evicts: bool = True) -> None:
        check_block_bytes(block_bytes, capacity)
        self._evicts = evicts
        self._block_bytes = block_bytes
        self._capacity = capacity
        self._lock = threading.Lock()  # for all below
        self._pool = SlotPool(block_bytes, capacity, pinned)
        self._entries: OrderedDict[bytes, HeldBlock] = OrderedDict()
        self._busy = 0  # slots being filled, or removed while they are read
        self._counts = Counts("memory")
        self._load_seconds = 0.0
        self._closed = False

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        check_keys(keys)
        with self._lock:
            self._check_open()
            answer = [key in self._entries for key in keys]
        self._counts.add(misses=answer.count(False))
        return answer

    def load(self, key: bytes, into: memoryview) -> bool:
        view = block_view("into", into, self._block_bytes, writable=True)
        if (loan := self.lend([key])[0]) is None:
            return False
        with loan as block:
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(block, np.uint8))
        return True

    def lend(self, keys: Sequence[bytes]) -> list[AbstractContextManager[memoryview] | None]:
        check_keys(keys)
        with self._lock:
            self._check_open()
            entries = [self._entries.get(key) for key in keys]
            # all loans before the first block counts as read: an error in between would leave it read forever
            loans: list[AbstractContextManager[memoryview] | None] = [
                None if entry is None else MemoryLoan(self, entry, self._pool) for entry in entries
            ]
            for key, entry in zip(keys, entries, strict=True):
                if entry is not None:
                    self._entries.move_to_end(key)
                    entry.readers += 1
            hits = len(loans) - loans.count(None)
            self._counts.add(hits=hits, misses=len(loans) - hits, bytes_loaded=hits * self._block_bytes)
        return loans

    def use(self, keys: Sequence[bytes]) -> None:
        check_keys(keys)
        with self._lock:
            self._check_open()
            for key in filter(self._entries.__contains__, reversed(keys)):
                self._entries.move_to_end(key)

    def end_read(self, entry: HeldBlock, pool: SlotPool, seconds: float) -> None:
        """Ends a loan of an entry's block in this pool."""
        with self._lock:
            self._load_seconds += seconds
            entry.readers -= 1
            # a store that was closed in the meantime has another pool
            if entry.removed and entry.readers == 0 and pool is self._pool:
                self._busy -= 1
                pool.give(entry.slot)

    def save(self, key: bytes, block: memoryview) -> bool:
        check_keys([key])
        view = block_view("block", block, self._block_bytes, writable=False)
        begin = time.perf_counter()
        with self._lock:
            self._check_open()
            if key in self._entries:
                self._entries.move_to_end(key)
                return True
            slot = self._take_slot()
            if slot is None:
                self._counts.add(errors=1)
                return False
            self._busy += 1
            pool = self._pool
        entry = None
        try:
            target = pool.view(slot)
            np.copyto(target, np.frombuffer(view, np.uint8))
            entry = HeldBlock(slot, target.data.toreadonly())
        finally:
            is_kept = self._end_save(key, entry, slot, pool)
        if not is_kept:
            return not self._closed
        self._counts.add(saves=1, bytes_saved=self._block_bytes, save_seconds=time.perf_counter() - begin)
        return True

    def _end_save(self, key: bytes, entry: HeldBlock | None, slot: int, pool: SlotPool) -> bool:
        """Makes the slot's block visible; frees the slot if the copy failed or another thread was faster."""
        with self._lock:
            if pool is not self._pool:  # closed in the meantime
                return False
            self._busy -= 1
            if entry is None or key in self._entries:
                pool.give(slot)
                return False
            self._entries[key] = entry
            return True

    def delete(self, keys: Sequence[bytes]) -> int:
        check_keys(keys)
        with self._lock:
            self._check_open()
            return sum(self._remove(key) for key in keys)

    def clear(self) -> int:
        with self._lock:
            self._check_open()
            return sum(self._remove(key) for key in list(self._entries))

    def verify(self) -> tuple[int, int]:
        """All blocks are intact: nothing can change them in this process's memory."""
        with self._lock:
            self._check_open()
            return len(self._entries), 0

    def stats(self) -> StoreStats:
        with self._lock:
            blocks, seconds = len(self._entries), self._load_seconds
        held = {"blocks": blocks, "bytes": blocks * self._block_bytes, "capacity": self._capacity}
        return self._counts.stats(load_seconds=seconds, **held)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is free, holds a block, or is in use for the last time."""
        with self._lock:
            assert self._pool.free + len(self._entries) + self._busy == self._pool.allocated
            assert self._pool.allocated * self._block_bytes <= self._capacity
            slots = [entry.slot for entry in self._entries.values()]
            assert len(set(slots)) == len(slots)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for key in list(self._entries):
                self._remove(key)
            # threads that are copying keep their references to the old pool
            self._pool = SlotPool(self._block_bytes, self._capacity, False)
            self._busy = 0

    def _take_slot(self) -> int | None:
        """Returns a free slot, otherwise the slot of the oldest block without readers; None if all have readers."""
        try:
            slot = self._pool.take_slot()
        except (MemoryError, RuntimeError) as error:
            logger.warning("memory store: the system has no more memory: %s", error)
            slot = None
        if slot is None and self._evicts:
            oldest = next((key for key, entry in self._entries.items() if entry.readers == 0), None)
            if oldest is not None:
                self._remove(oldest)
                self._counts.add(evictions=1)
                slot = self._pool.take_slot()
        return slot

    def _remove(self, key: bytes) -> bool:
        if (entry := self._entries.pop(key, None)) is None:
            return False
        entry.removed = True
        if entry.readers:
            self._busy += 1
        else:
            self._pool.give(entry.slot)
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the memory store is closed")


class SharedMemoryStore(ConfiguredStore):
    """One user's hold on a memory store. Users of one process with equal options and block size share a store, which is
    empty again when the last of them has closed it: vLLM's scheduler and worker, in one process, see the same blocks.

    evicts: False for a store that is not shared and from which no block may leave for another.
    """

    Options = MemoryStoreOptions
    advice = "lower store.capacity, or see how much memory the process may use"

    waits = False
    batch_bytes = MemoryStore.batch_bytes
    _lock = threading.Lock()
    _open: ClassVar[dict[tuple[object, ...], tuple[MemoryStore, int]]] = {}  # with the number of users

    def __init__(self, options: MemoryStoreOptions, block_bytes: int, evicts: bool = True) -> None:
        self._name: tuple[object, ...] = (options, block_bytes) if evicts else (self,)
        with self._lock:
            store, users = self._open.get(self._name) or (_new_store(options, block_bytes, evicts), 0)
            self._open[self._name] = store, users + 1
        self._store: MemoryStore | None = store
        self._closed_with: StoreStats | None = None

    @classmethod
    def open(cls, options: MemoryStoreOptions, block_bytes: int, evicts: bool = True) -> Self:
        return cls(options, block_bytes, evicts)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return self._used.lookup(keys)

    def load(self, key: bytes, into: memoryview) -> bool:
        return self._used.load(key, into)

    def lend(self, keys: Sequence[bytes]) -> list[AbstractContextManager[memoryview] | None]:
        return self._used.lend(keys)

    def save(self, key: bytes, block: memoryview) -> bool:
        return self._used.save(key, block)

    def use(self, keys: Sequence[bytes]) -> None:
        self._used.use(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._used.delete(keys)

    def clear(self) -> int:
        return self._used.clear()

    def verify(self) -> tuple[int, int]:
        return self._used.verify()

    def stats(self) -> StoreStats:
        return self._closed_with or self._used.stats()

    def check_integrity(self) -> None:
        """Like `MemoryStore.check_integrity`."""
        self._used.check_integrity()

    def close(self) -> None:
        with self._lock:
            if self._store is None:
                return
            self._closed_with = self._store.stats()
            store, users = self._open.pop(self._name)
            if users > 1:
                self._open[self._name] = store, users - 1
            else:
                store.close()
            self._store = None

    @property
    def _used(self) -> MemoryStore:
        if self._store is None:
            raise RuntimeError("the memory store is closed")
        return self._store


def _new_store(options: MemoryStoreOptions, block_bytes: int, evicts: bool) -> MemoryStore:
    """Raises UcmConfigError for page-locked memory without a device."""
    pinned = can_pin() if options.pin == "auto" else options.pin
    if pinned and not can_pin():
        raise UcmConfigError([Problem("store.pin", "true", "false or auto here: page-locked memory needs a device")])
    return MemoryStore(block_bytes, options.capacity, pinned, evicts)
