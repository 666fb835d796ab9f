"""Logits rows: one dimension, so that the best rows for every count are known exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats
from vllm_gaudi_ucm.graphs.tuning.objective import Objective
from vllm_gaudi_ucm.graphs.tuning.quantise import Quantisation, quantise

# With more values than that the exact table would take minutes; neighbours are then taken together.
MAX_VALUES = 1024


def best_rows(objective: Objective, most: int) -> tuple[Quantisation, NDArray[np.int64]]:
    """The best 1 .. `most` rows, as indices into the values that come second; the last value is always among them."""
    ends = _group_ends(objective.logits_weights)
    values = objective.logits[ends]
    return quantise(objective.cost.logits_seconds(values), _group_weights(objective, ends), most), values


def least_rows_seconds(objective: Objective, most: int) -> Floats:
    """[most] seconds that no 1 .. `most` logits graphs undercut."""
    ends = _group_ends(objective.logits_weights)
    starts = np.concatenate([[0], ends[:-1] + 1])
    total = quantise(
        objective.cost.logits_seconds(objective.logits[starts]), _group_weights(objective, ends), most
    ).total
    return np.concatenate([total, np.full(most - len(total), total[-1])])


def _group_ends(weights: Floats) -> NDArray[np.int64]:
    """Every value ends a group of its own, or, of many, the heaviest and some at equal distances do."""
    n = len(weights)
    if n <= MAX_VALUES:
        return np.arange(n)
    heaviest = np.argsort(-weights, kind="stable")[: MAX_VALUES // 2]
    return np.union1d(heaviest, np.linspace(0, n - 1, MAX_VALUES // 2).astype(np.int64))


def _group_weights(objective: Objective, ends: NDArray[np.int64]) -> Floats:
    sums = np.cumsum(objective.logits_weights)[ends]
    return np.diff(sums, prepend=0.0)
