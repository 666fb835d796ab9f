"""How long answers of this server were, and which of those that run will probably still run later."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

import numpy as np

MOST_SEEN = 1024
"""Answers that count: the latest."""


class OutputLengths:
    """Lengths of the latest answers."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, length: int) -> None:
        """An answer has ended with so many tokens."""
        if len(self._latest) == MOST_SEEN:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._latest.append(length)
        insort(self._sorted, length)

    def alive(self, generated: np.ndarray, later: np.ndarray) -> np.ndarray:
        """float64 [answers, times]: the probability that an answer of so many tokens has not ended then.

        generated: int64 [answers]. later: int64 [times]. One more answer is counted that never ends (the rule of
        succession): 1 where none was longer, and nearly what was seen where many were.
        """
        lengths = np.array(self._sorted, np.int64)
        now = len(lengths) - np.searchsorted(lengths, generated, side="right")
        then = len(lengths) - np.searchsorted(lengths, generated[:, None] + later, side="right")
        return (then + 1) / (now + 1)[:, None]
