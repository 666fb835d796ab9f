"""A store for tests of the prefetch engine: what it does with each key is said by the test."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from vllm_gaudi_ucm.store.base import KvStore, StoreStats

BLOCK_BYTES = 64


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def content(of: bytes, size: int = BLOCK_BYTES) -> bytes:
    """What a block holds: its key, again and again."""
    return (of * (size // len(of) + 1))[:size]


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it holds within some seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


class ScriptedStore(KvStore):
    """Holds the numbers it is given. `gate`: loads wait for it. `order`: keys in the order of their loads."""

    def __init__(self, numbers: Iterable[int] = (), is_open: bool = True) -> None:
        self.blocks = {key(number) for number in numbers}
        self.errors: dict[bytes, BaseException] = {}
        self.gate = threading.Event()
        if is_open:
            self.gate.set()
        self.order: list[bytes] = []
        self.running = 0
        self.most_running = 0
        self._lock = threading.Lock()

    def loads(self) -> Counter[bytes]:
        with self._lock:
            return Counter(self.order)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.blocks for key in keys]

    def load(self, key: bytes, into: memoryview) -> bool:
        with self._lock:
            self.order.append(key)
            self.running += 1
            self.most_running = max(self.running, self.most_running)
        try:
            assert self.gate.wait(60), "the test never opened the gate"
            into[:] = b"\xee" * len(into)
            if key in self.errors:
                raise self.errors.pop(key)
            if key not in self.blocks:
                return False
            into[:] = content(key, len(into))
            return True
        finally:
            with self._lock:
                self.running -= 1

    def save(self, key: bytes, block: memoryview) -> bool:
        self.blocks.add(key)
        return True

    def delete(self, keys: Sequence[bytes]) -> int:
        found = self.blocks.intersection(keys)
        self.blocks -= found
        return len(found)

    def clear(self) -> int:
        return self.delete(list(self.blocks))

    def verify(self) -> tuple[int, int]:
        return len(self.blocks), 0

    def stats(self) -> StoreStats:
        return StoreStats(kind="scripted", blocks=len(self.blocks))

    def close(self) -> None:
        """Nothing to end."""
