"""What an implementation of block selection is, and the registry of those that there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.ops.registry import Implementation, Implementations

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind


class BlockSelectionImplementation(Implementation[None], ABC):
    """The operations of `block_selection.api`, of validated tensors. None: the reference computes them."""

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
    ) -> Tensor | None:
        """As `block_scores`."""

    @abstractmethod
    def choose(self, scores: Tensor, places: Tensor, num_spans: int, width: int, most: int) -> Tensor | None:
        """As `choose_blocks`."""

    def keep_or_replace(
        self, stored: Tensor, fresh: Tensor, counts: Tensor, modes: Tensor, thresholds: Tensor, width: int
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
