"""Ways to score blocks: every kind of summary, the true attention (oracle), and scores without a query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.sparse_budget import Budget
from benchmarks.sparse_step import Step
from vllm_gaudi_ucm.ops.block_selection.api import block_scores, choose_blocks, new_summaries, write_summaries
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind

ORACLE = "oracle"
NARROW = (SummaryKind.MEAN, SummaryKind.MINMAX, SummaryKind.BOX_MEAN)
"""Kinds that are kept in 8-bit floats, too; of codes there is one form."""


@dataclass(frozen=True)
class Method:
    """Scores float32 `[rows, blocks]` of a step under a budget; scores of other blocks do not matter."""

    name: str
    scores: Callable[[Step, Budget], Tensor]
    depends_on_ratio: bool = False


def all_methods() -> tuple[Method, ...]:
    """Every method of the table, the summaries first."""
    return (
        *(Method(kind.value, _of_summaries(kind)) for kind in SummaryKind),
        *(Method(f"{kind.value}_fp8", _of_summaries(kind, narrow=True)) for kind in NARROW),
        Method(ORACLE, oracle),
        Method("history", history, depends_on_ratio=True),
        Method("recency", recency),
        Method("random", at_random),
    )


def select(scores: Tensor, step: Step, budget: Budget) -> Tensor:
    """Bool `[rows, blocks]`: the blocks that rows attend to, live blocks and blocks selected by `scores`."""
    rows, width = scores.shape
    candidates = budget.candidates(step.row_blocks, width)
    places = torch.where(candidates.view(-1), torch.arange(rows * width), rows * width)
    ranking = choose_blocks(scores.reshape(-1), places, rows, width, width)
    counts = budget.num_selected(step.row_blocks, width)
    chosen = (torch.arange(width) < counts[:, None]) & (ranking >= 0)
    selected = torch.zeros(rows, width + 1, dtype=torch.bool)
    selected.scatter_(1, torch.where(chosen, ranking, width), True)
    return selected[:, :width] | budget.live(step.row_blocks, width)


def oracle(step: Step, budget: Budget) -> Tensor:
    """The attention itself: no selection that all heads share has a higher recall."""
    return step.mass


def recency(step: Step, budget: Budget) -> Tensor:
    """The newest blocks."""
    return torch.arange(step.num_blocks, dtype=torch.float32).expand(len(step.query), -1)


def at_random(step: Step, budget: Budget) -> Tensor:
    """Seeded, and different in every layer and row."""
    generator = torch.Generator().manual_seed(step.layer)
    return torch.rand(len(step.query), step.num_blocks, generator=generator)


def history(step: Step, budget: Budget) -> Tensor:
    """Half a point for each earlier row that selected the block, and up to one for being recent (seed 000, 5.2)."""
    counts = torch.zeros(step.num_blocks)
    scores = torch.zeros(len(step.query), step.num_blocks)
    for row in range(len(step.query)):
        blocks = int(step.row_blocks[row])
        scores[row, :blocks] = 0.5 * counts[:blocks] + torch.linspace(0.1, 1.0, blocks)
        one = Step(step.layer, step.query[row : row + 1], step.keys, step.contexts[row : row + 1], 1.0, step.block_size)
        counts += select(scores[row : row + 1], one, budget)[0]
    return scores


def _of_summaries(kind: SummaryKind, narrow: bool = False) -> Callable[[Step, Budget], Tensor]:
    def scores(step: Step, budget: Budget) -> Tensor:
        summaries = new_summaries(step.key_cache, kind, narrow=narrow)
        write_summaries(step.key_cache, torch.arange(1, step.num_blocks + 1), summaries, kind)
        candidates = budget.candidates(step.row_blocks, step.num_blocks)
        result = torch.zeros(len(step.query), step.num_blocks)
        for row, mine in enumerate(candidates):
            result[row, mine] = _scores_of_row(step, row, mine.nonzero()[:, 0], summaries, kind)
        return result

    return scores


def _scores_of_row(step: Step, row: int, blocks: Tensor, summaries: Tensor, kind: SummaryKind) -> Tensor:
    """Scores `[candidates]` of one row: a span of one row, as in a decode step."""
    return block_scores(
        step.query[row : row + 1],
        summaries,
        blocks + 1,
        torch.zeros_like(blocks),
        torch.zeros(1, dtype=torch.int64),
        torch.ones(1, dtype=torch.int64),
        1,
        step.scale,
        kind,
    )
