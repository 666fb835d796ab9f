"""A block of the memory store, lent where it lies."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_gaudi_ucm.store.memory import MemoryStore
    from vllm_gaudi_ucm.store.slot_pool import SlotPool


@dataclass
class Entry:
    """A block of the store. view: of its slot, read-only. readers: loans of it."""

    slot: int
    view: memoryview
    readers: int = 0
    removed: bool = False
    """While it was lent: the last reader gives its slot back."""


class MemoryLoan:
    """A context, for one use. Small: it is made and ended between copies, with nothing left in the caches."""

    __slots__ = ("_begin", "_entry", "_pool", "_store")

    def __init__(self, store: MemoryStore, entry: Entry, pool: SlotPool) -> None:
        self._store = store
        self._entry = entry
        self._pool = pool
        self._begin = time.perf_counter()

    def __enter__(self) -> memoryview:
        return self._entry.view

    def __exit__(self, *exception: object) -> None:
        self._store.end_read(self._entry, self._pool, time.perf_counter() - self._begin)
