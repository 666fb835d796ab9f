"""How far back the rows of a KV-cache group see, if not over their whole context."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WHOLE = 2**31 - 1
"""More tokens than any context has."""


class Window(NamedTuple):
    """A sliding window, or chunked local attention.

    tokens: the row at position p sees positions above `p - tokens`, including its own; if `chunked`, it sees its own
        chunk of this many tokens, from the chunk's first position on.
    by_distance: whether scores have a bias by distance (ALiBi), so that attention needs the position of a block: lo of
        every range is below 0 by the number of visible tokens before its block. Without a window `tokens` is WHOLE.
    """

    tokens: int
    chunked: bool = False
    by_distance: bool = False

    def first_seen(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first position that the row at each position sees, which never falls along positions."""
        if self.chunked:
            return positions // self.tokens * self.tokens
        return np.maximum(positions - (self.tokens - 1), 0)

    def hides_from(self, positions: NDArray[np.int64]) -> bool:
        """Returns whether a row at one of these positions does not see all earlier ones, or its distances count."""
        return bool(len(positions)) and (self.by_distance or int(positions.max()) >= self.tokens)


class WindowPlan(NamedTuple):
    """A window applied to the rows of a step. Requests are in flat order.

    lowest: int64 [requests] first position that a request's first row sees. Later rows see no earlier position.
    rise: int64 [rows] distance from `lowest` to the first position that a row sees.
    first_rows: int64 [rows] the first row of its request that a row sees.
    by_distance: see Window.
    """

    lowest: NDArray[np.int64]
    rise: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    by_distance: bool

    @classmethod
    def from_rows(
        cls,
        window: Window,
        computed: NDArray[np.int64],
        positions: NDArray[np.int64],
        row_requests: NDArray[np.int64],
        query_start: NDArray[np.int64],
    ) -> WindowPlan:
        """Applies a window to a step. computed: [requests] tokens before the new ones; others as in `UnifiedPlan`."""
        lowest, first = window.first_seen(computed), window.first_seen(positions)
        inside = np.maximum(first - computed[row_requests], 0)
        return cls(lowest, first - lowest[row_requests], query_start[:-1][row_requests] + inside, window.by_distance)


def blocks_before(lowest: NDArray[np.int64], context: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Returns [requests] the number of leading blocks of which no row sees a token; all if it sees none."""
    return np.where(lowest < context, lowest // block_size, -(-context // block_size))
