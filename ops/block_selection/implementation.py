"""What an implementation of block selection is, and the registry of those that there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.ops.registry import Implementation, Implementations

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind


class PreparedSpans(NamedTuple):
    """What `scores` and `keep_or_replace` read of the spans of a step, the same in every layer.

    rows: int64 [candidates * max_rows] rows of the query of each candidate, one repeated where there are fewer.
    seen, hidden: bool [candidates, max_rows, 1] whether such a row is a real one, and whether it is not.
    attended: bool [spans, most] ranks that are attended. checked, reused: bool [spans] by mode.
    """

    rows: Tensor
    seen: Tensor
    hidden: Tensor
    attended: Tensor
    checked: Tensor
    reused: Tensor


class BlockSelectionImplementation(Implementation[None], ABC):
    """The operations of `block_selection.api`, of validated tensors. None: the reference computes them."""

    def prepare(
        self,
        spans: Tensor,
        first_rows: Tensor,
        num_rows: Tensor,
        max_rows: int,
        counts: Tensor,
        modes: Tensor,
        most: int,
    ) -> PreparedSpans | None:
        """As `prepare_spans`; None: `scores` and `keep_or_replace` have nothing to compute in advance."""
        return None

    @abstractmethod
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
        prepared: PreparedSpans | None = None,
    ) -> Tensor | None:
        """As `block_scores`. prepared: by `prepare` of the same implementation, where that has been called."""

    @abstractmethod
    def choose(self, scores: Tensor, places: Tensor, num_spans: int, width: int, most: int) -> Tensor | None:
        """As `choose_blocks`."""

    def keep_or_replace(
        self,
        stored: Tensor,
        fresh: Tensor,
        counts: Tensor,
        modes: Tensor,
        thresholds: Tensor,
        width: int,
        prepared: PreparedSpans | None = None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """As `keep_or_replace`; a few small operations, which the reference does well on a CPU."""
        return None


BLOCK_SELECTION: Implementations[BlockSelectionImplementation] = Implementations(
    "block_selection",
    "vllm_gaudi_ucm.block_selection_implementations",
    reference="vllm_gaudi_ucm.ops.block_selection.impl.reference:ReferenceBlockSelection",
    cuda="vllm_gaudi_ucm.ops.block_selection.impl.cuda:CudaBlockSelection",
    hpu="vllm_gaudi_ucm.ops.block_selection.impl.hpu:HpuBlockSelection",
    native="vllm_gaudi_ucm.ops.block_selection.impl.native:NativeBlockSelection",
)
