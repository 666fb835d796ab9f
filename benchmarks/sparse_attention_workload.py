"""Decode and verification of several requests over a paged cache: dense, and with blocks chosen per layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.api import block_scores, choose_blocks
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.block_selection.impl.cpu.native import NativeSelection, StepCandidates
from vllm_gaudi_ucm.ops.cpu.native.library import native
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    CausalSlice,
    SelectedPart,
    SharedGroup,
    SharedPart,
    UniquePart,
)
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec
from vllm_gaudi_ucm.sparse.selection.block_scorer import OverRanks

BLOCK_SIZE = 128
LIVE = 2  # blocks that are always attended: the first (sink) and the last (local window)
KIND = SummaryKind.MEAN
POOL_BYTES = 1_300_000_000  # of the caches of all layers, unless one layer needs more
MOST_LAYERS = 29
DRAFTS = 4


@dataclass(frozen=True)
class Model:
    heads: int
    kv_heads: int
    dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}/{self.dim}"


class Inputs(NamedTuple):
    """New tokens of a step, and the blocks that an earlier step chose; None: they are chosen in this one."""

    query: Tensor
    key: Tensor
    value: Tensor
    locked: Tensor | None = None


@dataclass(frozen=True)
class Contender:
    """A contender: `run` of a layer, with inputs that `fresh` makes outside the measured time."""

    fresh: Callable[[], Inputs]
    run: Callable[[int, Inputs], Tensor]


class Workload:
    """Requests of equal context in scattered blocks, in as many layers as fit, so that none stays in the CPU's caches.

    one_call: a choice is one call of the native selection, if there is one, otherwise several operations.
    Summaries are random, not means of the random keys: these would nearly be zero.
    """

    def __init__(self, model: Model, requests: int, context: int, one_call: bool = True) -> None:
        self.model, self.requests, self.blocks, self.one_call = model, requests, context // BLOCK_SIZE, one_call
        count = requests * self.blocks
        self.tables = 1 + torch.randperm(count).view(requests, self.blocks)
        self.spans = torch.arange(requests)
        room = (count + 1, BLOCK_SIZE, model.kv_heads, 2 * model.dim)
        self.layers = max(1, min(MOST_LAYERS, POOL_BYTES // (4 * torch.Size(room).numel())))
        self.caches = torch.randn(self.layers, *room)
        self.summaries = torch.randn(self.layers, *KIND.shape(count + 1, BLOCK_SIZE, model.kv_heads, model.dim))

    def contenders(self) -> dict[str, Contender]:
        """Returns the contenders, by the names of the figures."""
        return {
            "dense": self.dense(),
            "sparse_30": self.sparse(0.3),
            "sparse_10": self.sparse(0.1),
            "locked_10": self.locked_decode(0.1),
            "verify_10": self.locked_verification(0.1, 1 + DRAFTS),
        }

    def dense(self) -> Contender:
        attend = self._attention(AttentionParts(unique=self._unique(self.tables)))
        return Contender(lambda: self._tokens(1), lambda layer, new: attend(layer, new, None))

    def sparse(self, budget: float, over_ranks: OverRanks | None = None) -> Contender:
        """A decode: scores of the candidates, the choice, and attention. The budget counts the live blocks.

        over_ranks: a function applied to the scores before the choice, if any.
        """
        chosen = self._chosen(budget)
        parts = AttentionParts(unique=self._unique(self.tables[:, [0, -1]]), selected=self._selected(chosen, 1))
        attend, choose = self._attention(parts), self._choice(chosen, over_ranks)
        return Contender(lambda: self._tokens(1), lambda layer, new: attend(layer, new, choose(layer, new.query)))

    def locked_decode(self, budget: float) -> Contender:
        """A decode with the blocks of an earlier step."""
        chosen = self._chosen(budget)
        parts = AttentionParts(unique=self._unique(self.tables[:, [0, -1]]), selected=self._selected(chosen, 1))
        return self._locked(parts, chosen, 1)

    def locked_verification(self, budget: float, rows: int) -> Contender:
        """Several rows per request, which share one choice of an earlier step, the live blocks and the drafts."""
        chosen, live = self._chosen(budget), self.tables[:, [0, -1]]
        owners = self.spans.repeat_interleave(rows)
        hi = (torch.eye(self.requests, dtype=torch.int32) * BLOCK_SIZE).repeat_interleave(LIVE, 1)
        firsts = range(0, self.requests * rows, rows)
        own = (torch.arange(first, first + rows) for first in firsts)
        groups = tuple(SharedGroup(mine, i * LIVE, (i + 1) * LIVE) for i, mine in enumerate(own))
        parts = AttentionParts(
            CausalPart(owners.int(), tuple(CausalSlice(first, first + rows, first, first + rows) for first in firsts)),
            SharedPart(live.flatten(), owners, torch.zeros_like(hi), hi, groups),
            selected=self._selected(chosen, rows),
        )
        return self._locked(parts, chosen, rows)

    def error(self) -> float:
        """Largest difference between dense attention and sparse attention that may choose every block, in one step."""
        new, dense, sparse = self._tokens(1), self.dense(), self.sparse(1.0)
        return float((dense.run(0, new).clone() - sparse.run(0, new)).abs().max())

    def _locked(self, parts: AttentionParts, chosen: int, rows: int) -> Contender:
        attend, choose = self._attention(parts), self._choice(chosen)

        def fresh() -> Inputs:
            return self._tokens(rows)._replace(locked=choose(0, self._tokens(1).query).clone())

        return Contender(fresh, lambda layer, new: attend(layer, new, new.locked))

    def _tokens(self, rows: int) -> Inputs:
        model, total = self.model, self.requests * rows
        new = torch.randn(2, total, model.kv_heads, model.dim)
        return Inputs(torch.randn(total, model.heads, model.dim), new[0], new[1])

    def _chosen(self, budget: float) -> int:
        return max(LIVE + 1, round(budget * self.blocks)) - LIVE

    def _attention(self, parts: AttentionParts) -> Callable[[int, Inputs, Tensor | None], Tensor]:
        ready, dim = prepare(parts, BLOCK_SIZE), self.model.dim
        spec = AttentionSpec(dim**-0.5)

        def attend(layer: int, new: Inputs, ids: Tensor | None) -> Tensor:
            keys, values = self.caches[layer].split(dim, dim=-1)
            return unified_attention(*new[:3], keys, values, ready, spec, selected_blocks=ids)

        return attend

    def _choice(self, chosen: int, over_ranks: OverRanks | None = None) -> Callable[[int, Tensor], Tensor]:
        """Returns the choice of a layer's blocks; data of the step alone is made here."""
        candidates = self.tables[:, 1:-1].contiguous()
        width, scale = candidates.shape[1], self.model.dim**-0.5
        owners, places = self.spans.repeat_interleave(width), torch.arange(self.requests * width)
        blocks, ones = candidates.flatten(), torch.ones_like(self.spans)
        if native() is not None and self.one_call and over_ranks is None:
            choices, owner = torch.arange(self.requests * chosen), self.spans.repeat_interleave(chosen)
            span = self.spans, ones, 0 * ones, chosen * ones, 0 * ones, self.spans
            step = StepCandidates(blocks, owners, places, *span, choices, owner, ones[owner], blocks, width, chosen)
            selection, checks = NativeSelection(step), torch.zeros(2, dtype=torch.int64)
            stored = torch.zeros(self.layers, self.requests, chosen, dtype=torch.int64)

            def choose_at_once(layer: int, query: Tensor) -> Tensor:
                ids = selection.choose(query, self.summaries[layer], stored[layer], scale, KIND, checks)
                assert ids is not None
                return ids

            return choose_at_once

        def choose(layer: int, query: Tensor) -> Tensor:
            scores = block_scores(query, self.summaries[layer], blocks, owners, self.spans, ones, 1, scale, KIND)
            scores = scores if over_ranks is None else over_ranks(scores)
            return candidates.gather(1, choose_blocks(scores, places, self.requests, width, chosen)).flatten()

        return choose

    def _unique(self, tables: Tensor) -> UniquePart:
        rows = self.spans.repeat_interleave(tables.shape[1])
        hi = torch.full((len(rows),), BLOCK_SIZE, dtype=torch.int32)
        return UniquePart(tables.flatten(), rows, torch.zeros_like(hi), hi, self.requests)

    def _selected(self, chosen: int, rows: int) -> SelectedPart:
        owners = self.spans.repeat_interleave(chosen)
        full, num_rows = torch.full_like(owners, BLOCK_SIZE), torch.full_like(self.spans, rows)
        return SelectedPart(torch.zeros_like(owners), owners, full, self.spans * rows, num_rows, rows)
