"""How long answers of this server were, and how many tokens more an answer will probably have."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

MOST_SEEN = 1024
"""Answers that count: the latest."""
FEWEST_SEEN = 16
"""Fewer answers that went on from here predict nothing."""


class OutputLengths:
    """Lengths of the latest answers.

    Args:
        quantile: share of answers that stay below the prediction.
        least: tokens that are predicted at least.
    """

    def __init__(self, quantile: float, least: int) -> None:
        self._quantile = quantile
        self._least = least
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        """An answer has ended with so many tokens."""
        if len(self._latest) == MOST_SEEN:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]
        self._latest.append(length)
        insort(self._sorted, length)

    def left(self, generated: int, most: int) -> int:
        """Tokens that an answer of `generated` tokens will have still: of the answers that were longer, a quantile.

        most: what the request allows, the prediction where too few answers were longer.
        """
        first = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - first
        if longer < FEWEST_SEEN:
            return most
        length = self._sorted[first + int(self._quantile * (longer - 1) + 0.5)]
        return min(most, max(self._least, length - generated))
