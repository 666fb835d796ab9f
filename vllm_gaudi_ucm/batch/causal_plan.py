"""The causal part of a step: new tokens of a request that see each other."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.window import WindowPlan


class CausalPlan(NamedTuple):
    """Row ranges of the requests with more than one new token, cut in slices `(query_lo, query_hi, key_lo, key_hi)`.

    first_rows: int64 [rows], under a window: the first row of its request that a row sees.
    """

    groups: NDArray[np.int32]
    slices: list[tuple[int, int, int, int]]
    first_rows: NDArray[np.int64] | None = None

    def pairs(self) -> int:
        """Returns the (row, row) pairs: row i of a request's n new rows sees i + 1 of them, or fewer under a window."""
        if self.first_rows is not None:
            rows = np.flatnonzero(self.groups >= 0)
            return int((rows + 1 - self.first_rows[rows]).sum())
        sizes = np.bincount(self.groups[self.groups >= 0])
        return int((sizes * (sizes + 1) // 2).sum())


def plan_causal(
    num_single: int,
    row_requests: NDArray[np.int64],
    query_start: NDArray[np.int64],
    causal_slice: int,
    window: WindowPlan | None,
) -> CausalPlan | None:
    """Returns the plan of the rows after the single ones; None if there are none.

    The arrays come from the step's plan. causal_slice: rows of a slice.
    """
    bounds = query_start[num_single:].tolist()
    if len(bounds) == 1:
        return None
    groups = row_requests.astype(np.int32)
    groups[:num_single] = -1
    slices = []
    for start, stop in pairwise(bounds):
        for lo in range(start, stop, causal_slice):
            hi = min(lo + causal_slice, stop)
            slices.append((lo, hi, start if window is None else int(window.first_rows[lo]), hi))
    return CausalPlan(groups, slices, None if window is None else window.first_rows)
