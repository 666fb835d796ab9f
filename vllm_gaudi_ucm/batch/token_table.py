"""The token tables of the live requests, as runs of consecutive slots: reading them costs runs, not tokens."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

# The three numbers of a run.
FIRST, BEGIN, STEP = range(3)
NEVER = np.iinfo(np.int32).max
"""The first position of unused runs."""
_NOWHERE = -2
_FEW_RUNS = 8


class TokenTable:
    """The slots of the tokens of each request, with a row per request.

    A run is a sequence of consecutive positions in consecutive slots of one tile, ascending or descending, because
    freed slots come back in the reverse order. int32 `[first slot, first position, step]`, step 1 or -1; a run ends
    where the next one begins.

    Slot `s` of vLLM's block pool has the index `s + tile - 1`: its null slot is in the dummy tile, all others after it.

    Args:
        num_rows: number of requests to begin with.
        tile: slots that the operations read as one block.
    """

    def __init__(self, num_rows: int, tile: int) -> None:
        self._tile = tile
        self._runs = np.zeros((num_rows, _FEW_RUNS, 3), np.int32)
        self._runs[:, :, BEGIN] = NEVER
        self.num_runs = np.zeros(num_rows, np.int32)
        self.num_slots = np.zeros(num_rows, np.int32)
        self._last = np.full(num_rows, _NOWHERE, np.int32)
        self._rows: list[int] = []
        self._given: list[Sequence[int]] = []

    def append(self, row: int, slots: Sequence[int]) -> None:
        """Gives a request more slots, once `flush` is called; at most once per row before that."""
        if len(slots):
            self._rows.append(row)
            self._given.append(slots)

    def flush(self) -> None:
        """Enters the appended slots of all requests at once."""
        if not self._rows:
            return
        rows = np.array(self._rows)
        counts = np.fromiter(map(len, self._given), np.int64, len(rows))
        end = counts.cumsum()
        start = end - counts
        slots = np.fromiter(chain.from_iterable(self._given), np.int32, end[-1])
        slots += self._tile - 1
        self._rows, self._given = [], []

        before = np.empty_like(slots)
        before[1:] = slots[:-1]
        before[start] = self._last[rows]
        step = slots - before
        # a slot is in a table once, so a run cannot reverse
        begins = (np.abs(step) != 1) | (slots // self._tile != before // self._tile)
        number = begins.cumsum()
        owner = rows.repeat(counts)
        column = (self.num_runs[rows] - 1 - number[start] + begins[start]).repeat(counts) + number
        self._widen(int(column.max()) + 1)
        at = begins.nonzero()[0]
        positions = (self.num_slots[rows] - start).repeat(counts)[at] + at
        self._runs[owner[at], column[at]] = np.stack((slots[at], positions, np.ones(len(at), np.int64)), 1)
        at = (~begins).nonzero()[0]
        self._runs[owner[at], column[at], STEP] = step[at]
        self.num_runs[rows] = column[end - 1] + 1
        self.num_slots[rows] += counts.astype(np.int32)
        self._last[rows] = slots[end - 1]

    def clear(self, row: int) -> None:
        used = self._runs[row, : self.num_runs[row]]
        used[:] = 0
        used[:, BEGIN] = NEVER
        self.num_runs[row] = self.num_slots[row] = 0
        self._last[row] = _NOWHERE

    def blocks_of(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Returns [requests, width, 3] the runs of some requests, followed by runs that begin at `NEVER`."""
        return self._runs[rows, : int(self.num_runs[rows].max(initial=0))]

    def grow(self, num_rows: int) -> None:
        more = TokenTable(num_rows - len(self.num_runs), self._tile)
        more._widen(self._runs.shape[1])
        self._runs = np.concatenate([self._runs, more._runs[:, : self._runs.shape[1]]])
        self.num_runs = np.concatenate([self.num_runs, more.num_runs])
        self.num_slots = np.concatenate([self.num_slots, more.num_slots])
        self._last = np.concatenate([self._last, more._last])

    def _widen(self, width: int) -> None:
        if width <= self._runs.shape[1]:
            return
        runs = np.zeros((len(self._runs), max(width, 2 * self._runs.shape[1]), 3), np.int32)
        runs[:, :, BEGIN] = NEVER
        runs[:, : self._runs.shape[1]] = self._runs
        self._runs = runs
