"""The exact optimum in one dimension: which k values to round up to, by dynamic programming."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats


class Quantisation(NamedTuple):
    """total[k - 1]: the least total cost with k values. tops(k): indices of the values that attain it."""

    total: Floats
    cuts: NDArray[np.int64]

    def tops(self, k: int) -> list[int]:
        """Ascending indices of the k values that are rounded up to; the last one is always among them."""
        tops = []
        end = self.cuts.shape[1] - 1
        for level in range(k - 1, -1, -1):
            tops.append(end)
            end = int(self.cuts[level, end])
            if end < 0:
                break
        return tops[::-1]


def quantise(costs: Floats, counts: NDArray[np.int64] | Floats, most: int) -> Quantisation:
    """Rounds every value up to one of k, for each k up to `most`, at the least total cost.

    Args:
        costs: [n] ascending cost of each value.
        counts: [n] how often it occurs.
        most: the largest k; no more values than n are ever needed.
    """
    n = len(costs)
    weights = np.concatenate([[0.0], np.cumsum(counts)])
    # segment[i, j]: values i + 1 .. j rounded up to j, for i from -1 on (row 0).
    segment = costs[None, :] * (weights[None, 1:] - weights[:-1, None])
    segment[np.arange(n)[:, None] > np.arange(n)[None, :]] = np.inf
    best = segment[0].copy()
    cuts = [np.full(n, -1)]
    totals = [best[-1]]
    for _ in range(1, min(most, n)):
        candidates = best[:-1, None] + segment[1:]
        row = np.argmin(candidates, axis=0)
        extended = candidates[row, np.arange(n)]
        cuts.append(np.where(extended < best, row, cuts[-1]))
        # Where one value more does not help, the same cut is right: it leads to the layer below, which is as good.
        best = np.minimum(extended, best)
        totals.append(best[-1])
    return Quantisation(np.array(totals), np.array(cuts))
