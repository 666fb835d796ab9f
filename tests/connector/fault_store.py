"""A store in a dictionary that is slow, fails, hangs or lies when a test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import msgspec

from vllm_gaudi_ucm.store.base import KvStore, StoreStats


class FaultStore(KvStore):
    """Attributes may be changed at any time.

    load_seconds, lookup_seconds: what a call takes. fails, raises: loads miss although lookups hit, or raise.
    lost: keys that alone fail. refuses: nothing is saved. hangs: calls wait until it is cleared.
    asked: keys of the last look-up, in a prompt's order; `saved` has the order in which threads happened to save.
    used: keys of `use`, with the number of blocks saved before.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.load_seconds = self.lookup_seconds = 0.0
        self.fails = self.raises = self.refuses = self.lookup_raises = False
        self.lost: set[bytes] = set()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.loaded: list[bytes] = []
        self.saved: list[bytes] = []
        self.used: list[tuple[bytes, int]] = []
        self.looked_up = 0
        self.asked: list[bytes] = []
        self._lock = threading.Lock()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        time.sleep(self.lookup_seconds)
        with self._lock:
            self.looked_up += 1
            self.asked = list(keys)
            if self.lookup_raises:
                raise OSError("the store is gone")
            return [key in self.blocks for key in keys]

    def load(self, key: bytes, into: memoryview) -> bool:
        time.sleep(self.load_seconds)
        self.goes_on.wait()
        with self._lock:
            self.loaded.append(key)
            block = self.blocks.get(key)
        if self.raises:
            raise OSError("the store is gone")
        if block is None or self.fails or key in self.lost:
            into[:] = b"\xff" * len(into)  # NaN in every dtype: undefined means undefined
            return False
        into[:] = block
        return True

    def save(self, key: bytes, block: memoryview) -> bool:
        self.goes_on.wait()
        with self._lock:
            if self.refuses:
                return False
            self.saved.append(key)
            self.blocks[key] = bytes(block)
            return True

    def use(self, keys: Sequence[bytes]) -> None:
        if self.raises:
            raise OSError("the store is gone")
        with self._lock:
            self.used += [(key, len(self.saved)) for key in keys]

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return sum(self.blocks.pop(key, None) is not None for key in keys)

    def clear(self) -> int:
        with self._lock:
            count = len(self.blocks)
            self.blocks.clear()
            return count

    def verify(self) -> tuple[int, int]:
        return len(self.blocks), 0

    def stats(self) -> StoreStats:
        return msgspec.structs.replace(StoreStats(kind="fault"), blocks=len(self.blocks))

    def close(self) -> None:
        """Stays usable: one store for several engines of a test."""

    def heal(self) -> None:
        """Ends every fault."""
        self.__dict__.update(load_seconds=0.0, lookup_seconds=0.0, fails=False, raises=False, refuses=False)
        self.lookup_raises = False
        self.lost = set()
        self.goes_on.set()
