"""Block selection on the device: summaries beside the KV cache, and each layer's choice for the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from vllm_gaudi_ucm.observability.room_metrics import DeviceCounts
from vllm_gaudi_ucm.ops.block_selection.api import (
    block_scores,
    choose_blocks,
    keep_or_replace,
    new_summaries,
    write_summaries,
)
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.block_selection.impl.native import NativeSelection, StepCandidates
from vllm_gaudi_ucm.ops.unified_attention.api import PreparedParts
from vllm_gaudi_ucm.sparse.selection.block_scorer import BlockScorer, ScoredLayer
from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionLimits
from vllm_gaudi_ucm.sparse.selection.selection_tensors import SelectionTensors


class SelectionLayer(NamedTuple):
    """An attention layer. keys: its view [blocks, block size, kv heads, key size] of the KV cache."""

    keys: torch.Tensor
    scale: float


class KeptQueries(NamedTuple):
    """What is kept of each step to score all blocks of a request by, with KV offload.

    num_rows: blocks that can have a copy off the device. heads, dtype: of queries.
    """

    num_rows: int
    heads: int
    dtype: torch.dtype


class CandidateBlocks(NamedTuple):
    """What a method scores in one layer.

    layer_idx: of the layer. summaries: [blocks, vectors, kv heads, width] by physical block.
    blocks, spans: int64 [candidates] physical block, and the request that it belongs to.
    first_rows, num_rows: int64 [spans] rows of each request in `query`. max_rows: at most.
    places: int64 [candidates] span * width + logical block number; spans * width for pads.
    """

    layer_idx: int
    summaries: torch.Tensor
    blocks: torch.Tensor
    spans: torch.Tensor
    first_rows: torch.Tensor
    num_rows: torch.Tensor
    max_rows: int
    places: torch.Tensor
    width: int


@dataclass
class LayerSelection:
    """What the layers of one forward hand on to each other.

    tensors: of the step. dense_parts: the step's parts for dense layers, where there are such layers.
    reused: whether every request uses its stored choice, so that nothing is scored.
    at_once: whether a layer's choice may be one native call, on a CPU and outside of graphs.
    chosen: int64 [selected] the blocks of the current layer; None: it is dense.
    """

    tensors: SelectionTensors
    dense_parts: PreparedParts | None = None
    reused: bool = False
    at_once: bool = False
    chosen: torch.Tensor | None = None
    block_table: torch.Tensor = field(init=False)
    native: NativeSelection | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        t = self.tensors
        self.block_table = t.block_table()
        if self.at_once:
            spans = t.first_rows, t.num_rows, t.modes, t.counts, t.thresholds, t.choice_slots
            candidates = t.candidate_blocks, t.candidate_spans, t.candidate_places
            choices = t.choice_places, t.choice_spans, t.choice_hi
            self.native = NativeSelection(
                StepCandidates(*candidates, *spans, *choices, self.block_table, t.width, t.most)
            )


Score = Callable[[int, torch.Tensor, CandidateBlocks], torch.Tensor | None]
"""(layer, query [rows, heads, dim], candidates) -> float32 [candidates], or None for the scores of the summaries."""


class SelectionMetadata(Protocol):
    """What a layer's attention metadata says of block selection.

    summary_blocks: int64 [n] full blocks to summarise, None where there are none. selection: the step's choices.
    """

    @property
    def summary_blocks(self) -> torch.Tensor | None: ...

    @property
    def selection(self) -> LayerSelection | None: ...


class BlockSelector:
    """Tensors of all layers. Nothing here reads the device from the host, so it runs inside captured graphs.

    Args:
        layers: in the model's order.
        kind: of the summaries.
        limits: sizes of choices.
        reuse_layers: consecutive layers that share a choice; the first of them makes it.
        dense_layers: layers that attend to whole contexts.
        score: a method's own scores.
        kept: queries to keep of each step; None: none are.
    """

    def __init__(
        self,
        layers: Sequence[SelectionLayer],
        kind: SummaryKind,
        limits: SelectionLimits,
        reuse_layers: int = 1,
        dense_layers: Sequence[int] = (),
        score: Score | None = None,
        kept: KeptQueries | None = None,
    ) -> None:
        self._layers = layers
        self._kind = kind
        self._limits = limits
        self._score = score
        self.leaders = _leaders(len(layers), reuse_layers, dense_layers)
        self._measured = max((leader for leader in self.leaders if leader is not None), default=None)
        self._summaries = [new_summaries(layer.keys, kind) for layer in layers]
        device = layers[0].keys.device
        # one slot more than there are requests: pads store there
        shape = (len(layers), limits.max_num_seqs + 1, limits.most)
        self._stored = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.scorer = None if kept is None else self._scorer(kept)
        """Keeps the queries of each step; None without KV offload."""
        self.checks = torch.zeros(2, dtype=torch.int64, device=device)
        self.recall = torch.zeros(2, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)

    def _scorer(self, kept: KeptQueries) -> BlockScorer:
        chosen = sorted({leader for leader in self.leaders if leader is not None})
        layers = [ScoredLayer(index, self._summaries[index], self._layers[index].scale) for index in chosen]
        slots, width = self._limits.max_num_seqs + 1, self._limits.width
        shape = kept.heads, self._layers[0].keys.shape[-1]
        return BlockScorer(layers, self._kind, slots, kept.num_rows, width, shape, kept.dtype)

    def counts(self) -> DeviceCounts:
        """Reads the device: not to be called while graphs are captured, nor in every step."""
        return DeviceCounts(*self.checks.tolist(), *self.recall.tolist())

    @property
    def bytes(self) -> int:
        """Of summaries and stored choices."""
        kept = 0 if self.scorer is None else self.scorer.bytes
        return kept + sum(tensor.nbytes for tensor in (*self._summaries, self._stored))

    def attention_begin(self, layer_idx: int, query: torch.Tensor, metadata: SelectionMetadata) -> None:
        """Once the keys of the step are in the cache: summaries of full blocks, and the layer's choice."""
        if metadata.summary_blocks is not None:
            self.summarise(layer_idx, metadata.summary_blocks)
        if metadata.selection is not None:
            self.choose(layer_idx, query, metadata.selection)

    def summarise(self, layer_idx: int, blocks: torch.Tensor) -> None:
        """Writes the summaries of blocks (int64 [n]; pads are the dummy block) whose keys are all in the cache."""
        write_summaries(self._layers[layer_idx].keys, blocks, self._summaries[layer_idx], self._kind)

    def choose(self, layer_idx: int, query: torch.Tensor, selection: LayerSelection) -> None:
        """Sets `selection.chosen` for a layer: int64 [selected] physical blocks, or None for a dense layer.

        query: [rows, heads, dim].
        """
        leader = self.leaders[layer_idx]
        if leader is None:
            selection.chosen = None
        elif leader == layer_idx:
            if self.scorer is not None:
                self.scorer.keep_queries(layer_idx, query, selection.tensors)
            selection.chosen = self._choose_at_once(layer_idx, query, selection)
            if selection.chosen is None:
                selection.chosen = self._choose(layer_idx, query, selection)

    def _choose_at_once(self, layer_idx: int, query: torch.Tensor, selection: LayerSelection) -> torch.Tensor | None:
        """By one native call; None where there is none for this layer."""
        if selection.native is None or self._score is not None:
            return None
        recall = self.recall if layer_idx == self._measured else None
        layer, summaries, stored = self._layers[layer_idx], self._summaries[layer_idx], self._stored[layer_idx]
        return selection.native.choose(query, summaries, stored, layer.scale, self._kind, self.checks, recall)

    def _choose(self, layer_idx: int, query: torch.Tensor, selection: LayerSelection) -> torch.Tensor:
        t = selection.tensors
        stored = self._stored[layer_idx].index_select(0, t.choice_slots)
        ranking = stored if selection.reused else self._rank(layer_idx, query, t, stored)
        numbers = ranking.view(-1).index_select(0, t.choice_places).clamp_min(0)
        return selection.block_table.index_select(0, t.choice_spans * t.width + numbers)

    def _rank(self, layer_idx: int, query: torch.Tensor, t: SelectionTensors, stored: torch.Tensor) -> torch.Tensor:
        """int64 [spans, most] the choice of this step, which is stored."""
        scores = self._scores(layer_idx, query, t)
        fresh = choose_blocks(scores, t.candidate_places, t.num_spans, t.width, t.most)
        ranking, kept, replaced = keep_or_replace(stored, fresh, t.counts, t.modes, t.thresholds, t.width)
        self._stored[layer_idx].index_copy_(0, t.choice_slots, ranking)
        self.checks += torch.stack((kept.sum(), replaced.sum()))
        if layer_idx == self._measured:
            self._measure(scores, ranking, t)
        return ranking

    def _scores(self, layer_idx: int, query: torch.Tensor, t: SelectionTensors) -> torch.Tensor:
        asked = CandidateBlocks(
            layer_idx,
            self._summaries[layer_idx],
            t.candidate_blocks,
            t.candidate_spans,
            t.first_rows,
            t.num_rows,
            t.max_rows,
            t.candidate_places,
            t.width,
        )
        found = None if self._score is None else self._score(layer_idx, query, asked)
        return self._of_summaries(query, asked) if found is None else found

    def _of_summaries(self, query: torch.Tensor, asked: CandidateBlocks) -> torch.Tensor:
        blocks_of_rows = asked.summaries, asked.blocks, asked.spans, asked.first_rows, asked.num_rows, asked.max_rows
        return block_scores(query, *blocks_of_rows, self._layers[asked.layer_idx].scale, self._kind)

    def _measure(self, scores: torch.Tensor, ranking: torch.Tensor, t: SelectionTensors) -> None:
        """Adds to `recall` the estimated attention mass of chosen candidates, and of all; in one layer, to be cheap."""
        mass = scores.new_zeros(t.num_spans * t.width + 1).index_copy_(0, t.candidate_places, scores)
        # the place of pads; assigning a number would copy it from the host, which no graph captures
        mass[-1:].zero_()
        numbers = ranking.view(-1).index_select(0, t.choice_places).clamp_min(0)
        chosen = mass.index_select(0, t.choice_spans * t.width + numbers) * (t.choice_hi > 0)
        self.recall += torch.stack((chosen.sum(), mass.sum())).to(self.recall.dtype)


def _leaders(num_layers: int, reuse_layers: int, dense_layers: Sequence[int]) -> list[int | None]:
    """For each layer the layer that chooses for it, None for dense layers."""
    leaders: list[int | None] = []
    for layer in range(num_layers):
        first = layer - layer % reuse_layers
        group = [member for member in range(first, layer + 1) if member not in dense_layers]
        leaders.append(None if layer in dense_layers else group[0])
    return leaders
