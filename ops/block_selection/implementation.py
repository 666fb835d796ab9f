"""The interface of an implementation of block selection, and the registry of implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from vllm_gaudi_ucm.ops.registry import Implementation, Implementations

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
    from vllm_gaudi_ucm.ops.selected_list import SelectedList


class PreparedSpans(NamedTuple):
    """Tensors of a step's spans that `scores` and `keep_or_replace` read, the same in every layer.

    rows: int64 [candidates * max_rows] query rows of each candidate, one repeated if there are fewer.
    seen, hidden: bool [candidates, max_rows, 1] whether such a row is a real one, and whether it is not.
    attended: bool [spans, most] ranks that are attended. checked, reused: bool [spans] by mode.
    """

    rows: Tensor
    seen: Tensor
    hidden: Tensor
    attended: Tensor
    checked: Tensor
    reused: Tensor


class CandidateRanges(NamedTuple):
    """int32 [spans, 2]: the first candidate of each span and one past its last; empty if the span has no rows."""

    ranges: Tensor


class TicketedRanges(NamedTuple):
    """ranges: as in CandidateRanges. tickets: int32 [spans], 0 between layers: number of programs that ranked."""

    ranges: Tensor
    tickets: Tensor


Prepared = PreparedSpans | CandidateRanges | TicketedRanges
"""Data that an implementation computes once for the spans of a step, for its own use."""


class ChoosingSpans(NamedTuple):
    """The spans of a step that take a choice.

    stored: int64 [slots, most] contiguous, the table of rankings, updated in place. slots: int64 [spans] rows of it.
        Spans that share a row must have `counts` of 0; the content of that row is then undefined.
    counts, modes, thresholds, width: as in `keep_or_replace`; `counts` add up to at most `selected`.
    block_table: int64 [spans * width + 1] physical block of each place.
    selected: number of blocks that attention reads.
    checks: int64 [2] counters: how many checks kept the stored ranking, and how many replaced it.
    """

    stored: Tensor
    slots: Tensor
    counts: Tensor
    modes: Tensor
    thresholds: Tensor
    width: int
    block_table: Tensor
    selected: int
    checks: Tensor


class BlockSelectionImplementation(Implementation[None]):
    """The operations of `block_selection.api`, on validated tensors. None leaves the work to the reference."""

    ranks_and_takes: ClassVar[bool] = False
    """True if there is a `rank_and_take`, provided that there is a `take_choice`."""
    passes_over: ClassVar[bool] = False
    """True if scoring and ranking the candidates of a span without rows costs next to nothing."""

    def prepare(
        self,
        spans: Tensor,
        first_rows: Tensor,
        num_rows: Tensor,
        max_rows: int,
        counts: Tensor,
        modes: Tensor,
        most: int,
    ) -> Prepared | None:
        """Like `prepare_spans`; Returns None if there is nothing to compute in advance."""
        return None

    def write(self, key_cache: Tensor, blocks: Tensor, summaries: Tensor, kind: SummaryKind) -> bool:
        """Like `write_summaries`; Returns False to leave it to the reference."""
        return False

    def hands_over(self, most: int) -> bool:
        """True if there is a `take_choice` for rankings of this length."""
        return False

    def take_choice(self, fresh: Tensor, spans: ChoosingSpans) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def rank_and_take(
        self,
        scores: Tensor,
        places: Tensor,
        spans: ChoosingSpans,
        prepared: Prepared | None = None,
        target: SelectedList | None = None,
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def scores(
        self,
        query: Tensor,
        summaries: Tensor,
        blocks: Tensor,
        spans: Tensor,
        first_rows: Tensor,
        num_rows: Tensor,
        max_rows: int,
        scale: float,
        kind: SummaryKind,
        prepared: Prepared | None = None,
    ) -> Tensor | None:
        """Like `block_scores`. prepared: the result of `prepare` of the same implementation, if it was called."""
        return None

    def choose(
        self,
        scores: Tensor,
        places: Tensor,
        num_spans: int,
        width: int,
        most: int,
        prepared: Prepared | None = None,
    ) -> Tensor | None:
        """Like `choose_blocks`."""
        return None

    def keep_or_replace(
        self,
        stored: Tensor,
        fresh: Tensor,
        counts: Tensor,
        modes: Tensor,
        thresholds: Tensor,
        width: int,
        prepared: Prepared | None = None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Like `keep_or_replace`; a few small operations, which the reference does well on a CPU."""
        return None


BLOCK_SELECTION: Implementations[BlockSelectionImplementation] = Implementations(
    "block_selection",
    "vllm_gaudi_ucm.block_selection_implementations",
    reference="vllm_gaudi_ucm.ops.block_selection.impl.reference:ReferenceBlockSelection",
    cuda="vllm_gaudi_ucm.ops.block_selection.impl.cuda.selection:CudaBlockSelection",
    cuda_fused="vllm_gaudi_ucm.ops.block_selection.impl.cuda.fused:CudaFusedBlockSelection",
    hpu="vllm_gaudi_ucm.ops.block_selection.impl.hpu.selection:HpuBlockSelection",
    native="vllm_gaudi_ucm.ops.block_selection.impl.cpu.native:NativeBlockSelection",
)
