"""Keys that the store is known to hold, so that no block is sent to it twice."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

MOST_KEYS = 200_000  # 32 bytes each, and what Python takes: some 40 MB
SAVE_SECONDS = 5.0
"""A block that was sent to the store may take so long to be found there."""


class KnownKeys:
    """The last keys that were sent or found, up to a number; forgetting one costs a save that was not needed.

    Args:
        most: keys.
        clock: seconds.
    """

    def __init__(self, most: int = MOST_KEYS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._keys: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[bytes]) -> None:
        now = self._clock()
        for key in keys:
            self._keys[key] = now
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)

    def missed(self, keys: Iterable[bytes]) -> None:
        """The store does not hold them: forgotten, but for those that may still be on their way to it."""
        oldest = self._clock() - SAVE_SECONDS
        self.discard([key for key in keys if self._keys.get(key, oldest) <= oldest])

    def clear(self) -> None:
        self._keys.clear()
