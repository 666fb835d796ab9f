"""Chooses logits rows exactly: they have one dimension, so the best rows for every count can be computed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats
from vllm_gaudi_ucm_tools.tuning.objective import Objective


class Quantisation(NamedTuple):
    """total[k - 1]: the least total cost with k values. tops(k): indices of the values that attain it."""

    total: Floats
    cuts: NDArray[np.int64]

    def tops(self, k: int) -> list[int]:
        """Returns the ascending indices of the k values that others are rounded up to; the last value is always among
        them.
        """
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
        # If one more value does not help, the same cut is right: it leads to the layer below, which is as good.
        best = np.minimum(extended, best)
        totals.append(best[-1])
    return Quantisation(np.array(totals), np.array(cuts))


# With more values the exact table would take minutes; neighbours are then merged.
MAX_VALUES = 1024


def best_rows(objective: Objective, most: int) -> tuple[Quantisation, NDArray[np.int64]]:
    """Returns the best 1 .. `most` rows, as indices into the values, which come second; the last value is always among
    them.
    """
    ends = _group_ends(objective.logits_weights)
    values = objective.logits[ends]
    return quantise(objective.cost.logits_seconds(values), _group_weights(objective, ends), most), values


def least_rows_seconds(objective: Objective, most: int) -> Floats:
    """Returns [most] lower bounds in seconds for 1 .. `most` logits graphs."""
    ends = _group_ends(objective.logits_weights)
    starts = np.concatenate([[0], ends[:-1] + 1])
    total = quantise(
        objective.cost.logits_seconds(objective.logits[starts]), _group_weights(objective, ends), most
    ).total
    return np.concatenate([total, np.full(most - len(total), total[-1])])


def _group_ends(weights: Floats) -> NDArray[np.int64]:
    """Returns the last values of groups: every value, or, if there are too many, the heaviest and some at equal
    distances.
    """
    n = len(weights)
    if n <= MAX_VALUES:
        return np.arange(n)
    heaviest = np.argsort(-weights, kind="stable")[: MAX_VALUES // 2]
    return np.union1d(heaviest, np.linspace(0, n - 1, MAX_VALUES // 2).astype(np.int64))


def _group_weights(objective: Objective, ends: NDArray[np.int64]) -> Floats:
    sums = np.cumsum(objective.logits_weights)[ends]
    return np.diff(sums, prepend=0.0)
