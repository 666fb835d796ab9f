"""A sparse method of a third party, in one file: the method and its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.options import BlockOptions, MethodOptions

if TYPE_CHECKING:
    from torch import Tensor


class NewestOptions(BlockOptions):
    """Options of the method."""

    weight: float = Field(default=1.0, description="Of the newest block.")


class Newest(BlockSparse):
    """Prefers blocks in the order of the candidates."""

    Options: ClassVar[type[MethodOptions]] = NewestOptions

    def block_scores(self, layer_idx: int, query: Tensor, candidates: Any) -> Tensor | None:
        return query.new_ones(candidates.blocks.shape[0]).cumsum(0)


class Frugal(BlockSparse):
    """Wants fewer slots, which no scheduler of ours gives it."""

    def estimate_num_slots_sparsed(self, request: Any) -> int:
        return 3


class NoMethod:
    """Not a method."""
