"""Keys that the store is known to hold, so that no block is sent to it twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MOST_KEYS = 200_000  # 32 bytes each, and what Python takes: some 30 MB


class KnownKeys:
    """The last keys that were stored or found, up to a number; forgetting one costs a save that was not needed."""

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._most = most
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()
