"""Cached blocks that rows of one request see: the unique part and the selected part, block by block, then by row."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl import hpu_tile
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_tile import (
    Scaling,
    accumulate,
    attend_tile,
    block_tile,
    kv_tokens,
    piece_blocks,
    score_tokens,
)
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    Partial,
    SelectedPart,
    SharedGroup,
    SharedPart,
    UniquePart,
    combine,
    nothing,
    reduce_to_rows,
)


def unique(query: Tensor, key_cache: Tensor, value_cache: Tensor, part: UniquePart, scaling: Scaling) -> Partial | None:
    """Partial of the single rows [0, num_rows); None where there are none."""
    count, heads = part.rows.shape[0], query.shape[1]
    if count == 0 or part.num_rows == 0:
        return None
    found: Partial | None = None
    query = scaling.apply(query[: part.num_rows])
    together, tile = piece_blocks(heads, value_cache.shape[-1]), block_tile(key_cache, value_cache, heads)
    for first in range(0, count, together):
        last = min(first + together, count)
        pieces = [
            _unique_tile(query, key_cache, value_cache, part, slice(lo, min(lo + tile, last)))
            for lo in range(first, last, tile)
        ]
        empty = nothing(query, part.num_rows, value_cache.shape[-1])
        sums = reduce_to_rows(_join(pieces), part.rows[first:last], empty)
        found = accumulate(found, sums)
    return found


def _unique_tile(query: Tensor, key_cache: Tensor, value_cache: Tensor, part: UniquePart, span: slice) -> Partial:
    """Partial [blocks of the span, heads, ...]."""
    blocks = None if part.blocks is None else part.blocks[span]
    key, value = (
        cache[span] if blocks is None else cache.index_select(0, blocks) for cache in (key_cache, value_cache)
    )
    seen = in_range(part.lo[span], part.hi[span], key_cache.shape[1])
    rows = query.index_select(0, part.rows[span])[:, None]
    piece = attend_tile(rows, key, value, seen[:, None], seen)
    return Partial(*(tensor.squeeze(1) for tensor in piece))


def selected(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, part: SelectedPart, scaling: Scaling, blocks: Tensor
) -> Partial | None:
    """Partial of all rows over chosen blocks (int64 [selected]): each is read once for all rows of its span."""
    num_spans, most, heads = part.first_rows.shape[0], part.max_rows, query.shape[1]
    if 0 in (blocks.shape[0], num_spans, query.shape[0], most):
        return None
    step = torch.arange(most, device=query.device)
    inside = step < part.num_rows[:, None]
    rows = (part.first_rows[:, None] + step).clamp(max=query.shape[0] - 1)
    places = torch.arange(num_spans * most, device=query.device).view(num_spans, most)
    value_dim = value_cache.shape[-1]
    of_spans: Partial | None = None
    tile = min(block_tile(key_cache, value_cache, heads, most), piece_blocks(heads, value_dim, most))
    for ids, spans, hi in zip(blocks.split(tile), part.spans.split(tile), part.hi.split(tile), strict=True):
        seen = in_range(torch.zeros_like(hi), hi, key_cache.shape[1])
        mine = inside.index_select(0, spans)
        queries = query.index_select(0, rows.index_select(0, spans).flatten()).unflatten(0, (-1, most))
        key, value = (cache.index_select(0, ids) for cache in (key_cache, value_cache))
        piece = attend_tile(scaling.apply(queries), key, value, seen[:, None] & mine[..., None], seen)
        # a broken value is in the results of all rows of the tile, and these rows are somebody else's
        others = ~mine[..., None]
        piece = piece._replace(out=piece.out.masked_fill(others[..., None], 0), sum=piece.sum.masked_fill(others, 0))
        flat = Partial(*(tensor.flatten(0, 1) for tensor in piece))
        empty = nothing(query, num_spans * most, value_dim)
        sums = reduce_to_rows(_widen(flat), places.index_select(0, spans).flatten(), empty)
        of_spans = accumulate(of_spans, sums)
    assert of_spans is not None, "there is at least one tile"
    # a row beyond a span's own has seen nothing, so it may be added to any row
    return reduce_to_rows(of_spans, rows.flatten(), nothing(query, query.shape[0], value_dim))


def in_range(lo: Tensor, hi: Tensor, block_size: int) -> Tensor:
    """bool [..., block_size]: which tokens of the block lie in [lo, hi)."""
    token = torch.arange(block_size, device=lo.device)
    return (token >= lo[..., None]) & (token < hi[..., None])


def _join(pieces: list[Partial]) -> Partial:
    joined = pieces[0] if len(pieces) == 1 else Partial(*(torch.cat(column) for column in zip(*pieces, strict=True)))
    return _widen(joined)


def _widen(piece: Partial) -> Partial:
    return piece._replace(out=piece.out.float())


def shared(query: Tensor, key_cache: Tensor, value_cache: Tensor, part: SharedPart, scaling: Scaling) -> Partial | None:
    """Partial of all rows; cost follows the groups' rows x blocks."""
    groups = [group for group in part.groups if group.block_hi > group.block_lo and group.rows.shape[0]]
    if not groups:
        return None
    if len(groups) == 1 and groups[0].rows.shape[0] == query.shape[0]:
        return _all_rows(query, key_cache, value_cache, part, groups[0], scaling)
    result = nothing(query, query.shape[0], value_cache.shape[-1])
    for group in groups:
        for rows in group.rows.split(hpu_tile.MOST_ROWS):
            spans = part.row_spans.index_select(0, rows)
            piece = _group_rows(query.index_select(0, rows), key_cache, value_cache, part, group, spans, scaling)
            both = combine(Partial(*(whole.index_select(0, rows) for whole in result)), piece)
            for whole, tile in zip(result, both, strict=True):
                whole.index_copy_(0, rows, tile)
    return result


def _all_rows(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, part: SharedPart, group: SharedGroup, scaling: Scaling
) -> Partial:
    """A group of every row, as buckets have it: in whatever order it names them, they are taken as they lie."""
    pieces = [
        _group_rows(rows, key_cache, value_cache, part, group, spans, scaling)
        for rows, spans in zip(query.split(hpu_tile.MOST_ROWS), part.row_spans.split(hpu_tile.MOST_ROWS), strict=True)
    ]
    return pieces[0] if len(pieces) == 1 else Partial(*(torch.cat(column) for column in zip(*pieces, strict=True)))


def _group_rows(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    part: SharedPart,
    group: SharedGroup,
    spans: Tensor,
    scaling: Scaling,
) -> Partial:
    """Partial of rows [k, heads, dim] of a group over its blocks."""
    block_size = key_cache.shape[1]
    tokens = min(score_tokens(query.shape[1], query.shape[0]), kv_tokens(key_cache, value_cache))
    tile = max(1, tokens // block_size)
    query = scaling.apply(query)
    found: Partial | None = None
    for first in range(group.block_lo, group.block_hi, tile):
        columns = slice(first, min(first + tile, group.block_hi))
        ids = part.blocks[columns]
        key, value = (cache.index_select(0, ids).flatten(0, 1) for cache in (key_cache, value_cache))
        lo, hi = (bounds[:, columns].index_select(0, spans) for bounds in (part.lo, part.hi))
        piece = attend_tile(query, key, value, in_range(lo, hi, block_size).flatten(1))
        found = accumulate(found, piece)
    assert found is not None, "a group has at least one block"
    return found
