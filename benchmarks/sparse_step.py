"""One layer of a decode step of several rows: their queries, all keys, and the attention that each block truly gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """Rows of one request, each as if it were decoded by itself.

    query: `[rows, heads, dim]` and keys: `[tokens, kv_heads, dim]`, both after RoPE. contexts: int64 `[rows]`, tokens
    that a row attends to, including its own. Query head h uses kv head h // (heads / kv_heads).
    """

    layer: int
    query: Tensor
    keys: Tensor
    contexts: Tensor
    scale: float
    block_size: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all tokens, the last one may be partial."""
        return -(-self.keys.shape[0] // self.block_size)

    @property
    def row_blocks(self) -> Tensor:
        """Int64 `[rows]`: blocks of a row's context."""
        return (self.contexts + self.block_size - 1) // self.block_size

    @cached_property
    def key_cache(self) -> Tensor:
        """`[1 + num_blocks, block_size, kv_heads, dim]`: block 0 is the dummy block, logical block i is block i + 1."""
        before, tail = self.block_size, -self.keys.shape[0] % self.block_size
        padded = torch.nn.functional.pad(self.keys, (0, 0, 0, 0, before, tail))
        return padded.view(-1, self.block_size, *self.keys.shape[1:])

    @cached_property
    def mass(self) -> Tensor:
        """Returns `[rows, blocks]`: the share of its attention that a row gives to each block, averaged over the query
        heads.
        """
        heads, kv_heads = self.query.shape[1], self.keys.shape[1]
        folded = self.query.unflatten(1, (kv_heads, heads // kv_heads))
        scores = torch.einsum("rkgd,tkd->rkgt", folded, self.keys) * self.scale
        unseen = torch.arange(self.keys.shape[0]) >= self.contexts[:, None]
        share = scores.masked_fill_(unseen[:, None, None], float("-inf")).softmax(-1).mean((1, 2))
        tail = -self.keys.shape[0] % self.block_size
        return torch.nn.functional.pad(share, (0, tail)).view(len(share), -1, self.block_size).sum(2)
