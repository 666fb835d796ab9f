"""The calls of torch's CPU flash kernel that make up the attention of a layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

Rows = slice | Tensor


class CausalCall(NamedTuple):
    """`squares` adjacent squares of `length` new tokens each, from row `first` on; bias instead of a flag if short."""

    first: int
    squares: int
    length: int
    bias: Tensor | None


class BlockCall(NamedTuple):
    """`items` x `rows_per_item` rows against `tokens` cached tokens per item.

    blocks: int64 [items * blocks per item] to gather, or a slice of consecutive ones to read in place (one item).
    bias: fp32 [items, 1, 1 or rows_per_item, tokens], 0 or -inf; None where everything is seen.
    fresh: no earlier call of the plan has written any of these rows.
    """

    rows: Rows
    items: int
    rows_per_item: int
    blocks: Tensor | slice
    tokens: int
    bias: Tensor | None
    fresh: bool


class Plan(NamedTuple):
    """The calls of a layer; `fresh_rows` are written by a call that need not look at what is there.

    merges: some row is written by more than one call, so log-sum-exps are kept.
    scratch: where keys and values are gathered, kept from layer to layer, because fresh memory costs more than the copy
        into it. So a plan serves one layer at a time.
    selected: the step has a selected part, which no call covers.
    """

    causal: tuple[CausalCall, ...]
    cached: tuple[BlockCall, ...]
    fresh_rows: int
    merges: bool
    scratch: dict[str, Tensor]
    selected: bool = False


def range_bias(lo: Tensor, hi: Tensor, block_size: int) -> Tensor:
    """fp32 [spans, blocks * block_size]: 0 where a token is in range, else -inf."""
    token = torch.arange(block_size)
    visible = (token >= lo[..., None]) & (token < hi[..., None])
    return torch.zeros(visible.shape).masked_fill_(~visible, -math.inf).flatten(1)


def as_run(ids: Tensor) -> Rows:
    """Consecutive rows or blocks as a slice, which is read and written without a copy."""
    first, count = int(ids[0]), ids.shape[0]
    return slice(first, first + count) if torch.equal(ids, torch.arange(first, first + count)) else ids
