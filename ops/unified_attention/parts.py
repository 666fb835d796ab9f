"""The parts of a step's attention, as the operation sees them.

Which (row, cached token) pairs exist is decided by the planner; this module only names the tensors that carry
the decision. Integer ranges `[lo, hi)` over the tokens of a block describe tail block blocks (and, later, sliding
windows) without ever materialising a bias. Source: seed 001 (Unified Attention), design.md 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.index_maximum import index_maximum_


class CausalSlice(NamedTuple):
    """Rows `[query_lo, query_hi)` are multiplied with the new keys of rows `[key_lo, key_hi)`; nothing else is."""

    query_lo: int
    query_hi: int
    key_lo: int
    key_hi: int


class CausalTiles(NamedTuple):
    """All rows of a step in tiles of `rows` rows, each with how many rows before it some of its rows see.

    first, last: int64 [tiles] rows first .. last of each tile, at most `rows` of them; together every row, once. Row 0
        alone may be repeated.
    levels: host-side, descending; `levels[j]` tiles, the first ones, see rows from `first - j * rows` on or later ones.
        levels[0] is the number of tiles.
    """

    first: Tensor
    last: Tensor
    rows: int
    levels: tuple[int, ...]


class CausalPart(NamedTuple):
    """New tokens among themselves: row i sees row j iff both have the same group and j <= i.

    groups: int32 [rows], negative for a row that takes no part (single rows, pads). Rows of a group are contiguous.
    slices: host-side; they bound the cost, the groups alone decide what is seen. They cover every pair that is seen
        and their query ranges do not overlap.
    tiles: the same bound closer to the data, for an implementation whose shapes may not depend on it; others take the
        slices. Like these, they cover every pair that is seen.
    """

    groups: Tensor
    slices: tuple[CausalSlice, ...]
    tiles: CausalTiles | None = None


class SharedGroup(NamedTuple):
    """Rows that use the same run of shared blocks: `rows` (int64 [k]) x `blocks[block_lo:block_hi]`."""

    rows: Tensor
    block_lo: int
    block_hi: int


class SharedPart(NamedTuple):
    """Cached blocks that more than one row uses.

    blocks: int64 [shared] physical block ids.
    row_spans: int64 [rows]; rows of one request have one span, which indexes the first axis of lo and hi.
    lo, hi: int32 [spans, shared]; the span's rows see tokens lo <= t < hi of the block; hi <= lo: none.
    groups: host-side; they bound the cost, the ranges alone decide what is seen. Together they cover every pair with
        a non-empty range, each pair at most once.
    """

    blocks: Tensor
    row_spans: Tensor
    lo: Tensor
    hi: Tensor
    groups: tuple[SharedGroup, ...]


class UniquePart(NamedTuple):
    """Cached blocks that exactly one row uses. Only single rows, which come first in the flat layout, have any.

    blocks: int64 [unique] physical block ids to gather, or None to read the contiguous slice `cache[:unique]`, in which
        case entry b of the arrays below speaks of physical block b.
    rows: int64 [unique] row that uses the block. A block without a row has an empty range and any valid row.
    lo, hi: int32 [unique] token range of the block that the row sees; hi <= lo: none.
    num_rows: rows [0, num_rows) are the single rows; the reduction from blocks to rows runs over these only.
    """

    blocks: Tensor | None
    rows: Tensor
    lo: Tensor
    hi: Tensor
    num_rows: int


class SelectedPart(NamedTuple):
    """Cached blocks that a sparse method chose among a request's context, for all rows of that request.

    Which blocks they are may differ from layer to layer, so a layer can give its own (`selected_blocks` of the
    operation); how many each request has does not. A span is a request with a selection: rows `first_rows[i]` to
    `first_rows[i] + num_rows[i]`, one row in a decode and several in a verification.

    blocks: int64 [selected] physical block ids.
    spans: int64 [selected] span whose rows see the block.
    hi: int64 [selected] the rows see tokens [0, hi) of the block; 0: none (a pad, whose span is any valid one).
    first_rows, num_rows: int64 [spans]; a span without rows is a pad.
    max_rows: host-side, no span has more rows.
    """

    blocks: Tensor
    spans: Tensor
    hi: Tensor
    first_rows: Tensor
    num_rows: Tensor
    max_rows: int


class AttentionParts(NamedTuple):
    """What one step attends to. A part that the step does not have is None."""

    causal: CausalPart | None = None
    shared: SharedPart | None = None
    unique: UniquePart | None = None
    selected: SelectedPart | None = None


class Partial(NamedTuple):
    """Un-normalised softmax of some keys: natural logarithm, one entry per row and query head.

    out: fp32 [rows, heads, value_dim], sum over keys of exp(score - max) * value.
    max: fp32 [rows, heads], -inf where the row sees none of these keys.
    sum: fp32 [rows, heads], 0 where the row sees none of these keys.
    """

    out: Tensor
    max: Tensor
    sum: Tensor


NEG_INF = float("-inf")


def merge(partials: Sequence[Partial], out: Tensor) -> Tensor:
    """Normalised softmax over all partials, written to `out` [rows, heads, value_dim]; rows that see nothing are zeros.

    A partial may cover only the first rows (the single rows come first): the others see none of its keys.
    """
    rows = out.shape[0]
    merged = nothing(out, rows, out.shape[-1])
    for partial in partials:
        covered = partial.max.shape[0]
        both = combine(Partial(*(whole[:covered] for whole in merged)), partial)
        for whole, first in zip(merged, both, strict=True):
            whole[:covered] = first
    # The largest score of a row has weight 1, so a sum of 0 means exactly: nothing seen.
    total = torch.where(merged.sum == 0, 1.0, merged.sum)
    return out.copy_(merged.out / total[..., None])


def combine(a: Partial, b: Partial) -> Partial:
    """Partial over the keys of both; either may have seen nothing in any row."""
    top = torch.maximum(a.max, b.max)
    weight_a, weight_b = torch.exp(a.max - shift(top)), torch.exp(b.max - shift(top))
    out = a.out * weight_a[..., None] + b.out * weight_b[..., None]
    return Partial(out, top, a.sum * weight_a + b.sum * weight_b)


def shift(top: Tensor) -> Tensor:
    """What to subtract from scores: the maximum, or 0 where it is -inf, because -inf - -inf is NaN."""
    return torch.where(top == NEG_INF, 0.0, top)


def reduce_to_rows(pieces: Partial, rows: Tensor, result: Partial) -> Partial:
    """Adds pieces [pieces, heads, ...], each of the row that `rows` names, to a result that has seen nothing yet."""
    index_maximum_(result.max, rows, pieces.max)
    weight = torch.exp(pieces.max - shift(result.max)[rows])
    result.sum.index_add_(0, rows, pieces.sum * weight)
    result.out.index_add_(0, rows, pieces.out * weight[..., None])
    return result


def nothing(like: Tensor, rows: int, value_dim: int) -> Partial:
    """Partial of rows that have seen no key yet."""
    heads = like.shape[1]
    out = like.new_zeros((rows, heads, value_dim), dtype=torch.float32)
    top = like.new_full((rows, heads), NEG_INF, dtype=torch.float32)
    return Partial(out, top, like.new_zeros((rows, heads), dtype=torch.float32))
