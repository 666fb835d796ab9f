"""One memory store for all of its users in a process: vLLM's scheduler and worker may share one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.store.base import KvStore, StoreStats
from vllm_gaudi_ucm.store.memory import MemoryStore
from vllm_gaudi_ucm.store.options import MemoryStoreOptions


class SharedMemoryStore(KvStore):
    """One user's hold on the memory store that this process has for such options and block size."""

    waits = False
    batch_bytes = MemoryStore.batch_bytes
    _lock = threading.Lock()
    _open: ClassVar[dict[tuple[MemoryStoreOptions, int], tuple[MemoryStore, int]]] = {}  # with the number of users

    def __init__(self, options: MemoryStoreOptions, block_bytes: int) -> None:
        self._name = options, block_bytes
        with self._lock:
            store, users = self._open.get(self._name) or (new_memory_store(options, block_bytes), 0)
            self._open[self._name] = store, users + 1
        self._store: MemoryStore | None = store
        self._closed_with: StoreStats | None = None

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return self._used.lookup(keys)

    def load(self, key: bytes, into: memoryview) -> bool:
        return self._used.load(key, into)

    def lend(self, keys: Sequence[bytes]) -> list[AbstractContextManager[memoryview] | None]:
        return self._used.lend(keys)

    def save(self, key: bytes, block: memoryview) -> bool:
        return self._used.save(key, block)

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._used.delete(keys)

    def clear(self) -> int:
        return self._used.clear()

    def verify(self) -> tuple[int, int]:
        return self._used.verify()

    def stats(self) -> StoreStats:
        return self._closed_with or self._used.stats()

    def check_integrity(self) -> None:
        """As `MemoryStore.check_integrity`."""
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
        store = self._store
        if store is None:
            raise RuntimeError("the memory store is closed")
        return store


def new_memory_store(options: MemoryStoreOptions, block_bytes: int, evicts: bool = True) -> MemoryStore:
    """A store that nobody else opens; evicts: see MemoryStore.

    Raises UcmConfigError for page-locked memory without a device.
    """
    pinned = can_pin() if options.pin == "auto" else options.pin
    if pinned and not can_pin():
        raise UcmConfigError([Problem("store.pin", "true", "false or auto here: page-locked memory needs a device")])
    return MemoryStore(block_bytes, options.capacity, pinned, evicts)


def can_pin() -> bool:
    """Whether there is a device that copies faster from page-locked memory."""
    from vllm_gaudi_ucm.device import get_device
    from vllm_gaudi_ucm.device.detect import detect_device

    kind = detect_device()
    return kind is not None and get_device(kind).pins_host_memory
