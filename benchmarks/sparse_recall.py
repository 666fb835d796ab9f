"""Attention-mass recall: how much of the attention of dense rows falls on the blocks that a method selects for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.sparse_budget import Budget
from benchmarks.sparse_methods import Method, select
from benchmarks.sparse_rows import DecodedRows
from benchmarks.sparse_step import Step

# Recall of each layer, by method and ratio.
Recalls = dict[tuple[str, float], list[float]]


def measure_recall(
    rows: DecodedRows, sampled: Tensor, methods: Sequence[Method], budgets: Sequence[Budget], block_size: int
) -> Recalls:
    """Averages over the `sampled` rows (int64) of one dense pass. The budgets differ in their ratio only."""
    found: Recalls = {(method.name, budget.ratio): [] for method in methods for budget in budgets}

    def record(step: Step) -> None:
        few = Step(step.layer, step.query[sampled], step.keys, step.contexts[sampled], step.scale, step.block_size)
        for method in methods:
            scores = method.scores(few, budgets[0])
            for budget in budgets:
                if method.depends_on_ratio:
                    scores = method.scores(few, budget)
                found[method.name, budget.ratio].append(recall(few, select(scores, few, budget)))

    rows.logits(record, block_size)
    return found


def recall(step: Step, attended: Tensor) -> float:
    """Share of the attention on the attended blocks (bool `[rows, blocks]`), averaged over rows and query heads."""
    return float(torch.where(attended, step.mass, 0).sum(1).mean())
