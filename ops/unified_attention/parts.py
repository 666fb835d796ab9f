"""The parts of a step's attention, as the operation takes them.

The planner decides which rows see which tokens; this module defines the tensors that carry the decision. Integer ranges
`[lo, hi)` over the tokens of a block describe tail blocks and sliding windows without ever materialising a bias.
Source: seed 001 (Unified Attention), design.md 3.1 and 3.2.
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.index_maximum import index_maximum_


class CausalSlice(NamedTuple):
    """Rows `[query_lo, query_hi)` are multiplied by the new keys of rows `[key_lo, key_hi)`, and by no others."""

    query_lo: int
    query_hi: int
    key_lo: int
    key_hi: int


class CausalTiles(NamedTuple):
    """All rows of a step in tiles of `rows` rows, ordered by how far back they look.

    first, last: int64 [tiles]: a tile has the rows first .. last, at most `rows` of them. The tiles cover every row
        once. A tile with first 1 and last 0 is empty.
    levels: on the host, descending: only the first `levels[j]` tiles may look back as far as row `first - j * rows`.
        levels[0] is the number of tiles.
    """

    first: Tensor
    last: Tensor
    rows: int
    levels: tuple[int, ...]


class CausalPart(NamedTuple):
    """New tokens among themselves: row i sees row j iff both have the same group and j <= i.

    groups: int32 [rows], negative for a row without a causal part (single rows, pads). Rows of a group lie together.
    slices: on the host. They only bound the work; the groups decide what is seen. They cover every visible pair, and
        their query ranges do not overlap.
    tiles: the same bound as run-time data, for an implementation whose shapes must not depend on the data; the others
        use the slices. They cover every visible pair, too.
    first_rows: int [rows], under a sliding window or in chunks of local attention: row i sees no row before
        `first_rows[i]`, which never falls from one row of a group to the next. None: nothing is hidden.
    starts: int [requests + 1], for layers that see both ways: the first row of each request, and then the number of
        rows. Requests without rows may follow. None: not known.

    For layers that see both ways (`AttentionSpec.both_ways`), row i sees row j iff both have the same group.
    """

    groups: Tensor
    slices: tuple[CausalSlice, ...]
    tiles: CausalTiles | None = None
    first_rows: Tensor | None = None
    starts: Tensor | None = None


class SharedGroup(NamedTuple):
    """Rows that use the same range of shared blocks: `rows` (int64 [k]) x `blocks[block_lo:block_hi]`."""

    rows: Tensor
    block_lo: int
    block_hi: int


class SharedPart(NamedTuple):
    """Cached blocks that more than one row uses.

    blocks: int64 [shared] physical block ids.
    row_spans: int64 [rows]: the span of each row, an index into the first axis of lo and hi. A request is one span.
    lo, hi: int32 [spans, shared]: the rows of the span see tokens lo <= t < hi of the block; none if hi <= lo.
    groups: on the host. They only bound the work; the ranges decide what is seen. Together they cover every pair with
        a non-empty range, each pair at most once.
    from_first: on the host; lo is 0 everywhere, so nothing need be compared with it.
    rise: int [rows], under a sliding window or in chunks of local attention: the row sees tokens from
        `lo + rise` on. Each row of a span sees all blocks that later rows of it see; lo is that of the span's first
        row, and below 0 if that row also sees earlier blocks. None: the rows of a span see the same.
    most_of_span: on the host; no span sees more blocks, which a window guarantees. None: not known on the host.
    """

    blocks: Tensor
    row_spans: Tensor
    lo: Tensor
    hi: Tensor
    groups: tuple[SharedGroup, ...]
    from_first: bool = False
    rise: Tensor | None = None
    most_of_span: int | None = None

    def lo_of(self, rows: Tensor, columns: slice = slice(None)) -> Tensor:
        """Returns int [rows, columns]: the first token of these blocks that these rows see; may be below 0."""
        lo = self.lo[:, columns][self.row_spans[rows]]
        return lo if self.rise is None else lo + self.rise[rows, None]


class UniquePart(NamedTuple):
    """Cached blocks that exactly one row uses. Only single rows, which come first in the flat layout, have them.

    blocks: int64 [unique] physical block ids to gather, or None to read the contiguous slice `cache[:unique]`; entry b
        of the arrays below then belongs to physical block b.
    rows: int64 [unique] row that uses the block. A block without a row has an empty range and any valid row.
    lo, hi: int32 [unique] token range of the block that the row sees; none if hi <= lo.
    num_rows: rows [0, num_rows) are the single rows; only these take part in the reduction from blocks to rows.
    from_first: on the host; lo is 0 everywhere.
    num_tokens: on the host; tokens of all ranges, each of which lies inside its block. None: not known on the host.
    most_of_row: on the host; no row sees more blocks, which a window guarantees. None: not known on the host.
    places: int64 [unique], for layers that choose tokens: the block's place among its row's blocks. None: not known.
    """

    blocks: Tensor | None
    rows: Tensor
    lo: Tensor
    hi: Tensor
    num_rows: int
    from_first: bool = False
    num_tokens: int | None = None
    most_of_row: int | None = None
    places: Tensor | None = None


class SelectedPart(NamedTuple):
    """Cached blocks that a sparse method selected from the context of a request, for all rows of that request.

    The block ids may differ from layer to layer, so a layer can pass its own (`selected_blocks` of the operation); the
    number of blocks of a request is the same in all layers. A span is a request with a selection. It has the rows
    from `first_rows[i]` to `first_rows[i] + num_rows[i]`: one row in a decode, several in a verification.

    blocks: int64 [selected] physical block ids.
    spans: int64 [selected] span whose rows see the block.
    hi: int64 [selected]: the rows see tokens [0, hi) of the block. A pad has hi 0 and any valid span.
    first_rows, num_rows: int64 [spans]; a span without rows is a pad.
    max_rows: on the host; no span has more rows.
    """

    blocks: Tensor
    spans: Tensor
    hi: Tensor
    first_rows: Tensor
    num_rows: Tensor
    max_rows: int


class AttentionParts(NamedTuple):
    """The parts of one step; None for a part that the step does not have.

    positions: int64 [rows] of the rows in their requests, for layers with ALiBi slopes. Then lo of a shared or unique
        range is `-p`, where p is the position of its block's first token.
    """

    causal: CausalPart | None = None
    shared: SharedPart | None = None
    unique: UniquePart | None = None
    selected: SelectedPart | None = None
    positions: Tensor | None = None

    @property
    def are_local(self) -> bool:
        """True if a window or chunks keep rows from seeing all of their requests' contexts."""
        by_rows = self.causal is not None and self.causal.first_rows is not None
        return by_rows or (self.shared is not None and self.shared.rise is not None)


class Partial(NamedTuple):
    """Partial result: un-normalised softmax over some keys, one entry per row and query head; natural logarithm.

    out: fp32 [rows, heads, value_dim]: sum over the keys of exp(score - max) * value.
    max: fp32 [rows, heads]: -inf if the row sees none of these keys.
    sum: fp32 [rows, heads]: 0 if the row sees none of these keys.
    """

    out: Tensor
    max: Tensor
    sum: Tensor


NEG_INF = float("-inf")
NOTHING_SEEN = torch.finfo(torch.float32).min
"""Logarithm of the sum of a row that sees no token: finite, because -inf - -inf is NaN."""


def merge(partials: Sequence[Partial], out: Tensor, log_sums: Tensor | None = None) -> Tensor:
    """Writes the normalised softmax over all partials to `out` [rows, heads, value_dim]; rows that see nothing are 0.

    log_sums: fp32 [rows, heads], also written; see `unified_attention`.

    A partial may cover only the first rows (single rows come first): the other rows see none of its keys.
    """
    over_all = [_over_all_rows(partial, out) for partial in partials]
    merged = reduce(combine, over_all) if over_all else nothing(out, out.shape[0], out.shape[-1])
    if log_sums is not None:
        log_sums.copy_((merged.max + merged.sum.log()).clamp(min=NOTHING_SEEN))
    # The largest score of a row has weight 1, so a sum of 0 means exactly that the row saw no token.
    total = merged.sum[..., None]
    return out.copy_(torch.where(total == 0, 0.0, merged.out / total))


def _over_all_rows(partial: Partial, out: Tensor) -> Partial:
    """Extends a partial, which may have only the first rows, to all rows of `out`."""
    more = out.shape[0] - partial.max.shape[0]
    if not more:
        return partial
    return Partial(*map(torch.cat, zip(partial, nothing(out, more, out.shape[-1]), strict=True)))


def combine(a: Partial, b: Partial) -> Partial:
    """Returns the partial over the keys of both; in any row either may have seen no key."""
    top = torch.maximum(a.max, b.max)
    weight_a, weight_b = torch.exp(a.max - shift(top)), torch.exp(b.max - shift(top))
    out = a.out * weight_a[..., None] + b.out * weight_b[..., None]
    return Partial(out, top, a.sum * weight_a + b.sum * weight_b)


def shift(top: Tensor) -> Tensor:
    """Returns the number to subtract from scores: the maximum, or 0 if it is -inf, because -inf - -inf is NaN."""
    return torch.where(top == NEG_INF, 0.0, top)


def reduce_to_rows(pieces: Partial, rows: Tensor, result: Partial) -> Partial:
    """Adds pieces [pieces, heads, ...] to the rows that `rows` names, in a result that has seen no key yet."""
    index_maximum_(result.max, rows, pieces.max)
    weight = torch.exp(pieces.max - shift(result.max)[rows])
    result.sum.index_add_(0, rows, pieces.sum * weight)
    result.out.index_add_(0, rows, pieces.out * weight[..., None])
    return result


def nothing(like: Tensor, rows: int, value_dim: int) -> Partial:
    """Returns the partial of rows that have seen no key yet."""
    heads = like.shape[1]
    out = like.new_zeros((rows, heads, value_dim), dtype=torch.float32)
    top = like.new_full((rows, heads), NEG_INF, dtype=torch.float32)
    return Partial(out, top, like.new_zeros((rows, heads), dtype=torch.float32))
