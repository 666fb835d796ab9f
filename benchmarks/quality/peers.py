"""Other ways to choose blocks, as subclasses of `BlockSparse`. The harness calls their `block_scores`.

They are not registered, so no engine serves them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.options import BlockOptions, MethodOptions


def queries_of(query: Tensor, candidates: Any, kv_heads: int) -> Tensor:
    """Returns float32 [candidates, kv heads, group, dim]: the query of the row that decodes, for each candidate."""
    return query.float()[candidates.first_rows[candidates.spans]].unflatten(1, (kv_heads, -1))


def over_heads(estimates: Tensor, candidates: Any) -> Tensor:
    """Returns float32 [candidates]: a softmax of estimates [candidates, heads] in each request, averaged over heads."""
    spans, width = candidates.first_rows.shape[0], candidates.width
    table = estimates.new_full((spans * width + 1, estimates.shape[1]), float("-inf"))
    table.index_copy_(0, candidates.places, estimates)
    shares = table[:-1].view(spans, width, -1).softmax(1).nan_to_num(0.0).mean(-1).flatten()
    return torch.nn.functional.pad(shares, (0, 1))[candidates.places]


class MinMaxOptions(BlockOptions):
    """Options of a method that reads the smallest and largest value of each element of a key."""

    summary: Literal["minmax"] = Field(default="minmax", description="The kind of summary that this method reads.")


def quest_bound(heads: Tensor, bounds: Tensor) -> Tensor:
    """Returns [..., kv heads, group]: no product of the query with a key of the block is larger.

    heads: [..., kv heads, group, dim]. bounds: [..., 2, kv heads, dim].
    """
    low, high = (one.unsqueeze(-2) for one in bounds.float().unbind(-3))
    return torch.maximum(heads * low, heads * high).sum(-1)


class Quest(BlockSparse):
    """Quest (Tang et al., 2024): an upper bound of each block's largest score. All heads share the choice here."""

    Options: ClassVar[type[MethodOptions]] = MinMaxOptions

    def block_scores(self, layer_idx: int, query: Tensor, candidates: Any) -> Tensor:
        bounds = candidates.summaries[candidates.blocks]
        heads = queries_of(query, candidates, bounds.shape[2])
        scale = query.shape[-1] ** -0.5
        return over_heads(scale * quest_bound(heads, bounds).flatten(1), candidates)


class StreamingLLM(BlockSparse):
    """StreamingLLM (Xiao et al., 2023): sinks and the newest blocks, whatever the query."""

    Options: ClassVar[type[MethodOptions]] = BlockOptions

    def block_scores(self, layer_idx: int, query: Tensor, candidates: Any) -> Tensor:
        return (candidates.places % candidates.width).float()


class ExactTopK(BlockSparse):
    """Scores blocks by all of their keys: the bound for any choice of blocks that all heads share. It saves nothing."""

    Options: ClassVar[type[MethodOptions]] = BlockOptions

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self.keys = list(kv_caches.values())

    def block_scores(self, layer_idx: int, query: Tensor, candidates: Any) -> Tensor:
        # rows of one request share their blocks: a copy of the keys for each row takes most of a measurement's time
        blocks, place = candidates.blocks.unique(return_inverse=True)
        keys = self.keys[layer_idx][blocks].float()
        heads = query.float()[candidates.first_rows].unflatten(1, (keys.shape[2], -1))
        scores = torch.einsum("rkgd,bskd->rbskg", heads, keys) * query.shape[-1] ** -0.5
        return over_heads(scores.logsumexp(2)[candidates.spans, place].flatten(1), candidates)
