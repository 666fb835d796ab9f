"""Sparse prompts (`prompt_ratio`), offline: chunks whose tiles choose, and an answer that is dense."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.quality.budget import Budget
from benchmarks.quality.peers import ExactTopK
from benchmarks.quality.scores import Scores, of_method, of_summary, select
from benchmarks.sparse_rows import DecodedRows, Policy
from benchmarks.sparse_step import Step
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.sparse.selection.selection_limits import PromptTiles

CHUNKS = 4
"""The chunks of each prompt. The first one has nothing to choose from."""


@dataclass(frozen=True)
class SparsePrompt:
    """name: in tables. scores: by which tiles choose."""

    name: str
    scores: Scores

    def decoded(self, model: Any, tokens: Tensor, first: int, budget: Budget, place: Place) -> DecodedRows:
        """Returns the rows `tokens[first:]` after a sparse prompt."""
        chunk = -(-first // CHUNKS)

        def policy_of(begin: int) -> Policy | None:
            return tile_policy(begin, self.scores, budget, place.read)

        return DecodedRows(model, tokens, first, chunk, policy_of=policy_of, block_size=place.block_size)


class Place(NamedTuple):
    """read: gets the share of its context that each chunk's rows read, by layer."""

    block_size: int
    read: list[float]


def sparse_prompts() -> tuple[SparsePrompt, ...]:
    """Returns every way to choose in prompts."""
    return (
        SparsePrompt("prompt_gsa", of_summary(SummaryKind.BOX_MEAN)),
        SparsePrompt("prompt_hash", of_summary(SummaryKind.HASH)),
        SparsePrompt("prompt_exact", of_method(ExactTopK)),
    )


def tile_policy(begin: int, scores: Scores, budget: Budget, read: list[float]) -> Policy | None:
    """Returns the policy of the chunk that begins at token `begin`; None for the first chunk, which is dense."""
    if not begin:
        return None

    def policy(step: Step) -> Tensor:
        chosen = choose_by_tile(step, begin, scores, budget)
        read.append(float((chosen.sum(-1) / step.row_blocks).mean()))
        return chosen

    return policy


def choose_by_tile(step: Step, begin: int, scores: Scores, budget: Budget) -> Tensor:
    """Returns bool [rows, blocks] for a chunk: each tile's choice from the blocks before `begin`, and the chunk."""
    options = BlockOptions()
    tile = PromptTiles(options.prompt_tile, budget.ratio, 0)
    starts = range(0, len(step.query), tile.rows)
    before = replace(step, keys=step.keys[:begin])
    chosen = torch.ones(len(step.query), step.num_blocks, dtype=torch.bool)
    for start in starts:
        rows = slice(start, min(start + tile.rows, len(step.query)))
        query = step.query[rows][:: tile.row_step]
        few = replace(before, query=query, contexts=torch.full((len(query),), begin))
        one = replace(few, query=query[:1], contexts=few.contexts[:1])
        mine = select(scores(few, budget).mean(0, keepdim=True), one, budget)
        chosen[rows, : one.num_blocks] = mine
    return chosen
