"""Block selection of one layer, with only that layer's tensors.

Layers that do the same share one compiled region: a value that it reads of a layer must not be a number or None in one
layer and something else in the next. So layers differ by class, and each object has its own tensors, without an index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from vllm_gaudi_ucm.ops.block_selection.api import (
    block_scores,
    choose_blocks,
    hands_over,
    keep_or_replace,
    passes_over,
    prepare_spans,
    rank_and_take,
    ranks_and_takes,
    take_choice,
    write_summaries,
)
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.block_selection.implementation import ChoosingSpans, Prepared
from vllm_gaudi_ucm.ops.registry import AUTO
from vllm_gaudi_ucm.ops.unified_attention.api import PreparedParts
from vllm_gaudi_ucm.sparse.selection.block_scorer import OverRanks, ScoredLayer, keep_queries
from vllm_gaudi_ucm.sparse.selection.selection_tensors import SelectionTensors

if TYPE_CHECKING:
    from vllm_gaudi_ucm.ops.block_selection.impl.cpu.native import NativeSelection


class CandidateBlocks(NamedTuple):
    """The candidates that a method scores in one layer.

    layer_idx: index of the layer. summaries: [blocks, vectors, kv heads, width] by physical block.
    blocks, spans: int64 [candidates] physical block, and the request that it belongs to.
    first_rows, num_rows: int64 [spans] rows of each request in `query`; 0 rows if a GPU reuses its choice.
    max_rows: the most rows of a span.
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


class RankedSpans(NamedTuple):
    """The spans of a step whose candidates are scored and ranked.

    num_rows: int64 [spans] rows by which candidates are scored; 0: they are not. prepared: the result of
    `prepare_spans`.
    """

    num_rows: torch.Tensor
    prepared: Prepared | None

    @classmethod
    def from_tensors(cls, t: SelectionTensors, num_rows: torch.Tensor, implementation: str) -> RankedSpans:
        rows = t.candidate_spans, t.first_rows, num_rows, t.max_rows
        return cls(num_rows, prepare_spans(*rows, t.counts, t.modes, t.most, implementation=implementation))


@dataclass
class LayerSelection:
    """State that the layers of one forward pass on to each other.

    tensors: the step's tensors. dense_parts: the step's parts for dense layers, if there are such layers.
    reused: whether every request uses its stored choice, so that no layer scores.
    at_once: whether a layer's choice may be one native call, on a CPU and outside captured graphs.
    room: int64, for the blocks that native calls choose; None: memory of this step.
    implementation: of block selection, the same as the layers'. parts: of the layers that choose; a choice may write
        their list of blocks itself.
    chosen: int64 [selected] the blocks of the current layer; None: it is dense.
    scores, ranking: float32 [candidates] and int64 [spans, most] of the last layer that has scored; None before that.
    """

    tensors: SelectionTensors
    dense_parts: PreparedParts | None = None
    reused: bool = False
    at_once: bool = False
    room: torch.Tensor | None = None
    implementation: str = AUTO
    parts: PreparedParts | None = None
    chosen: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    ranking: torch.Tensor | None = None
    block_table: torch.Tensor = field(init=False)
    first_places: torch.Tensor = field(init=False)
    """int64 [selected] place of the first block of each chosen block's request."""
    spans: RankedSpans = field(init=False)
    measured: RankedSpans = field(init=False)
    """Same as `spans`, for the layer whose choices are measured, which also ranks reused ones."""
    native: NativeSelection | None = field(init=False, default=None)
    scored: SelectionTensors = field(init=False)
    """The tensors for the rows that score blocks, which `queries` returns."""
    _rows: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        t = self.tensors
        self.block_table = t.block_table()
        self.first_places = t.choice_spans * t.width
        self.scored, self._rows = t, None
        if not self.reused:
            self.scored, self._rows = t.scored()
            t = self.scored
        self.spans = self.measured = RankedSpans(t.num_rows, None)
        if not self.reused and not self.at_once:
            self.spans = self.measured = RankedSpans.from_tensors(t, t.num_rows, self.implementation)
            if passes_over(t.modes.device.type, implementation=self.implementation):
                self.spans = RankedSpans.from_tensors(t, t.ranked_rows, self.implementation)
        if self.at_once:
            from vllm_gaudi_ucm.ops.block_selection.impl.cpu.native import NativeSelection, StepCandidates

            spans = t.first_rows, t.num_rows, t.modes, t.counts, t.thresholds, t.choice_slots
            candidates = t.candidate_blocks, t.candidate_spans, t.candidate_places
            choices = t.choice_places, t.choice_spans, t.choice_hi
            self.native = NativeSelection(
                StepCandidates(*candidates, *spans, *choices, self.block_table, t.width, t.most), self.room
            )

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Returns the rows that score blocks: those that `scored` speaks of. query: [rows, heads, dim]."""
        return query if self._rows is None else query.index_select(0, self._rows)


Score = Callable[[int, torch.Tensor, CandidateBlocks], torch.Tensor | None]
"""(layer, query [rows, heads, dim], candidates) -> float32 [candidates], or None for the scores of the summaries."""


class Scoring(NamedTuple):
    """How blocks are scored and ranked.

    score: a method's own scores; None: those of the summaries.
    over_ranks: turns this rank's scores into those of all heads, if other ranks have other heads of the layer; None:
        this rank chooses by its own scores.
    implementation: of block selection.
    """

    score: Score | None = None
    over_ranks: OverRanks | None = None
    implementation: str = AUTO


class SelectionMetadata(Protocol):
    """The part of a layer's attention metadata that concerns block selection.

    summary_blocks: int64 [n] full blocks to summarise, None if there are none. selection: the step's choices.
    """

    @property
    def summary_blocks(self) -> torch.Tensor | None: ...

    @property
    def selection(self) -> LayerSelection | None: ...


class LayerSelector:
    """A layer with summaries, called by its attention. Subclasses define what it attends to.

    Args:
        summaries: [blocks, vectors, kv heads, width] for the blocks of the layer's KV cache.
    """

    def __init__(self, summaries: torch.Tensor, kind: SummaryKind) -> None:
        self.summaries = summaries
        self.kind = kind

    def attention_begin(self, query: torch.Tensor, keys: torch.Tensor, metadata: SelectionMetadata) -> None:
        """Writes summaries of full blocks and makes the layer's choice, once the keys of the step are in the cache.

        keys: [blocks, block size, kv heads, key size] returned by the write to the cache, see `write_kv`.
        """
        if metadata.summary_blocks is not None:
            self.summarise(keys, metadata.summary_blocks)
        if metadata.selection is not None:
            self.choose(query, metadata.selection)

    def summarise(self, keys: torch.Tensor, blocks: torch.Tensor) -> None:
        """Writes the summaries of blocks (int64 [n]; pads are the dummy block), all of whose keys are in `keys`."""
        write_summaries(keys, blocks, self.summaries, self.kind)

    def choose(self, query: torch.Tensor, selection: LayerSelection) -> None:
        """Sets `selection.chosen`: int64 [selected] physical blocks, or None for a dense layer.

        query: [rows, heads, dim].
        """
        raise NotImplementedError


class DenseLayer(LayerSelector):
    """A layer that attends to whole contexts."""

    def choose(self, query: torch.Tensor, selection: LayerSelection) -> None:
        selection.chosen = None


class FollowingLayer(LayerSelector):
    """A layer that attends to blocks that an earlier layer has chosen."""

    def choose(self, query: torch.Tensor, selection: LayerSelection) -> None:
        pass


class ChoosingLayer(LayerSelector):
    """A layer that chooses, for itself and for layers that follow it.

    Args:
        layer: its number in the model, its summaries, and the scale of its attention.
        kind: see LayerSelector.
        stored: int64 [slots, most] the ranking of each request; the last slot is the pads'.
        checks: int64 [2] for all layers: choices that a check has kept, and replaced.
        scoring: how it scores. A method's own scores name the layer, which then has a separate region.
        queries: [slots, heads, dim] if queries are kept, with KV offload.
        recall: for the one layer that is measured.
    """

    def __init__(
        self,
        layer: ScoredLayer,
        kind: SummaryKind,
        stored: torch.Tensor,
        checks: torch.Tensor,
        scoring: Scoring,
        *,
        queries: torch.Tensor | None = None,
        recall: torch.Tensor | None = None,
    ) -> None:
        super().__init__(layer.summaries, kind)
        self._scale = layer.scale
        self.stored = stored
        self.before = stored[:0]
        """See `take`."""
        self._checks = checks
        self._score = scoring.score
        self._layer_idx = layer.layer_idx
        self._queries = queries
        self._recall = recall
        self._implementation = implementation = scoring.implementation
        self._over_ranks = scoring.over_ranks
        self.hands_over = hands_over(stored.shape[1], stored.device.type, implementation=implementation)
        """True if a choice reads `stored` itself and returns the list that attention reads, so that `take` is not
        needed.
        """
        self._at_once = ranks_and_takes(stored.shape[1], stored.device.type, implementation=implementation)

    @property
    def chooses_at_once(self) -> bool:
        """Returns whether a native call may score and choose, because no other computation is needed in between."""
        return self._score is None and self._over_ranks is None

    def take_stored(self, before: torch.Tensor) -> None:
        """Takes int64 [spans, most], the stored rankings of the step's requests.

        A region that read them itself would have to copy `stored` before it writes there.
        """
        self.before = before

    def choose(self, query: torch.Tensor, selection: LayerSelection) -> None:
        t = selection.tensors
        if self._queries is not None:
            keep_queries(self._queries, query, t)
        rows, query = query.shape[0], selection.queries(query)
        if selection.native is not None and self.chooses_at_once:
            layer = query, self.summaries, self.stored, self._scale, self.kind
            found = selection.native.choose(*layer, self._checks, self._recall)
            if found is not None:
                selection.chosen = found
                return
            # kernels do not support these tensors, and `begin` has left the reading to them
            self.before = self.stored.index_select(0, t.choice_slots)
        if self.hands_over and not selection.reused:
            self._hand_over(query, selection, rows)
            return
        ranking = self.before if selection.reused else self._rank(query, selection)
        numbers = ranking.view(-1).index_select(0, t.choice_places).clamp_min(0)
        selection.chosen = selection.block_table.index_select(0, selection.first_places + numbers)

    def _rank(self, query: torch.Tensor, selection: LayerSelection) -> torch.Tensor:
        """Returns int64 [spans, most], the choice of this step, which is stored."""
        t, before, name = selection.tensors, self.before, self._implementation
        scores, fresh = self._fresh(query, selection)
        of_spans = t.counts, t.modes, t.thresholds
        ranking, kept, replaced = keep_or_replace(
            before, fresh, *of_spans, t.width, implementation=name, prepared=self._ranked(selection).prepared
        )
        self.stored.index_copy_(0, t.choice_slots, ranking)
        self._checks += torch.stack((kept, replaced)).sum(1)
        selection.scores, selection.ranking = scores, ranking
        return ranking

    def _hand_over(self, query: torch.Tensor, selection: LayerSelection, rows: int) -> None:
        """Sets `selection.chosen`, and stores the choice, with fewer operations than one for each of its steps. rows:
        of the step, some of which `query` has.
        """
        t, name = selection.tensors, self._implementation
        of_spans = t.choice_slots, t.counts, t.modes, t.thresholds
        selected = t.choice_spans.shape[0]
        spans = ChoosingSpans(self.stored, *of_spans, t.width, selection.block_table, selected, self._checks)
        if self._at_once:
            scores = self._scores_over_ranks(query, selection)
            target = None if selection.parts is None else selection.parts.selected_list(rows)
            prepared = self._ranked(selection).prepared
            found = rank_and_take(
                scores, t.candidate_places, spans, implementation=name, prepared=prepared, target=target
            )
        else:
            scores, fresh = self._fresh(query, selection)
            found = take_choice(fresh, spans, implementation=name)
        selection.scores, (selection.ranking, selection.chosen) = scores, found

    def _fresh(self, query: torch.Tensor, selection: LayerSelection) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns float32 [candidates] scores, and int64 [spans, most] the ranking by them."""
        t, name = selection.tensors, self._implementation
        scores = self._scores_over_ranks(query, selection)
        sizes, prepared = (t.num_spans, t.width, t.most), self._ranked(selection).prepared
        ranking = choose_blocks(scores, t.candidate_places, *sizes, implementation=name, prepared=prepared)
        return scores, ranking

    def _scores_over_ranks(self, query: torch.Tensor, selection: LayerSelection) -> torch.Tensor:
        scores = self._scores(query, selection)
        # every head has its own softmax, and every rank has the same number of heads, so the mean of the ranks' means
        # is the mean of all heads
        return scores if self._over_ranks is None else self._over_ranks(scores)

    def _scores(self, query: torch.Tensor, selection: LayerSelection) -> torch.Tensor:
        t, ranked = selection.scored, self._ranked(selection)
        spans = t.candidate_blocks, t.candidate_spans, t.first_rows, ranked.num_rows, t.max_rows
        if self._score is not None:
            asked = CandidateBlocks(self._layer_idx, self.summaries, *spans, t.candidate_places, t.width)
            found = self._score(self._layer_idx, query, asked)
            if found is not None:
                return found
        return block_scores(
            query,
            self.summaries,
            *spans,
            self._scale,
            self.kind,
            implementation=self._implementation,
            prepared=ranked.prepared,
        )

    def _ranked(self, selection: LayerSelection) -> RankedSpans:
        """Returns the spans of the step that this layer ranks."""
        return selection.spans if self._recall is None else selection.measured
