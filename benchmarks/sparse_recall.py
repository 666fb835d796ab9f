"""Attention-mass recall: how much of the attention of dense rows lies on the blocks that a method selects for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.sparse_budget import Budget
from benchmarks.sparse_methods import Method, select
from benchmarks.sparse_rows import DecodedRows
from benchmarks.sparse_step import Step

# Recall of each layer, by method and budget.
Recalls = dict[str, dict[float, list[float]]]


def measure_recall(
    rows: DecodedRows, sampled: Tensor, methods: Mapping[str, Method], budgets: Sequence[Budget], block_size: int
) -> Recalls:
    """Averages over the `sampled` rows (int64) of one dense pass; the attention of all query heads counts the same."""
    found: Recalls = {name: {budget.ratio: [] for budget in budgets} for name in methods}

    def record(step: Step) -> None:
        few = Step(step.layer, step.query[sampled], step.keys, step.contexts[sampled], step.scale, step.block_size)
        for name, method in methods.items():
            for budget in budgets:
                found[name][budget.ratio].append(recall(few, select(method(few, budget), few, budget)))

    rows.logits(record, block_size)
    return found


def recall(step: Step, attended: Tensor) -> float:
    """Share of the attention on the attended blocks (bool `[rows, blocks]`), averaged over rows and query heads."""
    return float(torch.where(attended, step.mass, 0).sum(1).mean())
