"""Scores of blocks, and the choice by them, with the operations that the engine captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.quality.budget import Budget
from benchmarks.quality.peers import ExactTopK
from benchmarks.sparse_step import Step
from vllm_gaudi_ucm.ops.block_selection.api import block_scores, choose_blocks, new_summaries, write_summaries
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.selection.layer_selector import CandidateBlocks

Scores = Callable[[Step, Budget], Tensor]
"""Returns float32 [rows, blocks]; scores of blocks that are no candidates do not matter."""


def select(scores: Tensor, step: Step, budget: Budget) -> Tensor:
    """Returns bool [rows, blocks]: live blocks, and blocks chosen by `scores`."""
    rows, width = scores.shape
    candidates = budget.candidates(step)
    places = torch.where(candidates.view(-1), torch.arange(rows * width), rows * width)
    ranking = choose_blocks(scores.reshape(-1), places, rows, width, width)
    chosen = (torch.arange(width) < budget.num_selected(step)[:, None]) & (ranking >= 0)
    selected = torch.zeros(rows, width + 1, dtype=torch.bool)
    selected.scatter_(1, torch.where(chosen, ranking, width), True)
    return selected[:, :width] | budget.live(step)


def step_candidates(step: Step, budget: Budget, summaries: Tensor) -> CandidateBlocks:
    """Returns all candidates of all rows, each row as a request of its own."""
    rows, width = len(step.query), step.num_blocks
    places = budget.candidates(step).flatten().nonzero()[:, 0]
    first_rows, num_rows = torch.arange(rows), torch.ones(rows, dtype=torch.int64)
    spans, blocks = places // width, places % width + 1
    return CandidateBlocks(step.layer, summaries, blocks, spans, first_rows, num_rows, 1, places, width)


def of_summary(kind: SummaryKind, narrow: bool = False) -> Scores:
    """Returns GSA's scores. narrow: whether summaries are 8-bit floats."""

    def scores(step: Step, budget: Budget) -> Tensor:
        all_of = step_candidates(step, budget, _summaries(step, kind, narrow))
        spans = (all_of.spans, all_of.first_rows, all_of.num_rows, all_of.max_rows)
        return _table(step, all_of, block_scores(step.query, all_of.summaries, all_of.blocks, *spans, step.scale, kind))

    return scores


def of_method(method: type[BlockSparse]) -> Scores:
    """Returns the scores of a method's own `block_scores`, as an engine calls it."""
    made = method(UcmSparseRole.WORKER)

    def scores(step: Step, budget: Budget) -> Tensor:
        kind = SummaryKind(made.block_options.summary)
        # the other methods of this package read no summary
        summaries = _summaries(step, kind) if kind is SummaryKind.MINMAX else new_summaries(step.key_cache, kind)
        if isinstance(made, ExactTopK):
            made.keys = [step.key_cache] * (step.layer + 1)
        candidates = step_candidates(step, budget, summaries)
        found = made.block_scores(step.layer, step.query, candidates)
        assert found is not None
        return _table(step, candidates, found)

    return scores


def _table(step: Step, candidates: CandidateBlocks, found: Tensor) -> Tensor:
    table = torch.zeros(len(step.query) * step.num_blocks)
    table[candidates.places] = found
    return table.view(len(step.query), -1)


def by_kv_head(scores: Scores) -> Callable[[Step, Budget], Tensor]:
    """Returns a choice in which each KV head chooses for its query heads: bool [heads, rows, blocks]."""

    def choose(step: Step, budget: Budget) -> Tensor:
        kv_heads = step.keys.shape[1]
        parts = zip(step.query.chunk(kv_heads, 1), step.keys.chunk(kv_heads, 1), strict=True)
        steps = [replace(step, query=query, keys=keys) for query, keys in parts]
        chosen = torch.stack([select(scores(one, budget), one, budget) for one in steps])
        return chosen.repeat_interleave(step.query.shape[1] // kv_heads, 0)

    return choose


def _summaries(step: Step, kind: SummaryKind, narrow: bool = False) -> Tensor:
    summaries = new_summaries(step.key_cache, kind, narrow=narrow)
    write_summaries(step.key_cache, torch.arange(1, step.num_blocks + 1), summaries, kind)
    return summaries
