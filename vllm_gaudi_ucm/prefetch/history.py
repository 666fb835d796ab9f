"""Which blocks of a request to prefetch first, before there is a query to ask. Source: seed 000 (GSA), 5.2.

History and position are a prior for the prefetch alone: what is attended is the query's choice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

HISTORY_WEIGHT = 0.5
OLDEST_WEIGHT, NEWEST_WEIGHT = 0.1, 1.0


class AccessHistory:
    """Counts of accesses by key that lose half of their weight every `half_life` steps; at most `capacity` keys.

    The key that was accessed least recently goes first. Not thread-safe.
    """

    def __init__(self, capacity: int, half_life: float = 256.0) -> None:
        if capacity < 1 or half_life <= 0:
            raise ValueError(f"found capacity {capacity} and half_life {half_life}, expected more than 0 of both")
        self._capacity = capacity
        self._half_life = half_life
        self._counts: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        self._step = 0

    def __len__(self) -> int:
        return len(self._counts)

    def advance(self, steps: int = 1) -> None:
        """Time passes, in steps of the engine."""
        self._step += steps

    def record(self, keys: Iterable[bytes]) -> None:
        """Blocks that a request uses now, one access each."""
        for key in keys:
            self._counts[key] = (self.count(key) + 1.0, self._step)
            self._counts.move_to_end(key)
        while len(self._counts) > self._capacity:
            self._counts.popitem(last=False)

    def count(self, key: bytes) -> float:
        """Accesses of a block, decayed up to now."""
        count, step = self._counts.get(key, (0.0, self._step))
        return count * 0.5 ** ((self._step - step) / self._half_life)

    def order(self, keys: Sequence[bytes], sinks: int = 1) -> list[int]:
        """Indices of a request's blocks, the one to prefetch first at the front.

        The first `sinks` blocks are attended whatever the query is. The others come by half of their accesses and
        their position, newer ones before older ones; equal ones stay in the order of the context.
        """
        span = (NEWEST_WEIGHT - OLDEST_WEIGHT) / max(len(keys) - 1, 1)
        scores = [HISTORY_WEIGHT * self.count(key) + OLDEST_WEIGHT + span * at for at, key in enumerate(keys)]
        return sorted(range(len(keys)), key=lambda at: (at >= sinks, -scores[at] if at >= sinks else at))
