"""A sparse method of a third party in one file: attends to the newest candidates, or to the oldest."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, cast

from pydantic import Field

from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.options import BlockOptions, MethodOptions

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gaudi_ucm.sparse.selection.layer_selector import CandidateBlocks


class RecencyOptions(BlockOptions):
    """Options of the method."""

    prefer: Literal["newest", "oldest"] = Field(default="newest", description="Which candidates are attended.")


class Recency(BlockSparse):
    """Scores a block by its number in the request; the query plays no role."""

    Options: ClassVar[type[MethodOptions]] = RecencyOptions

    def block_scores(self, layer_idx: int, query: Tensor, candidates: CandidateBlocks) -> Tensor | None:
        numbers = (candidates.places % candidates.width).float()
        return numbers if cast(RecencyOptions, self.options).prefer == "newest" else -numbers
