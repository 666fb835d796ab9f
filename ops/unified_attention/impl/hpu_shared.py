"""Cached blocks that several rows use: tiles of rows times tiles of gathered blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl import hpu_sizes
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_blocks import in_range
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_sizes import kv_tokens, score_tokens
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_tile import Scaling, accumulate, attend_tile
from vllm_gaudi_ucm.ops.unified_attention.partial import combine, nothing
from vllm_gaudi_ucm.ops.unified_attention.parts import Partial, SharedGroup, SharedPart


def shared(query: Tensor, key_cache: Tensor, value_cache: Tensor, part: SharedPart, scaling: Scaling) -> Partial | None:
    """Partial of all rows; cost follows the groups' rows x blocks."""
    groups = [group for group in part.groups if group.block_hi > group.block_lo and group.rows.shape[0]]
    if not groups:
        return None
    if len(groups) == 1 and groups[0].rows.shape[0] == query.shape[0]:
        return _all_rows(query, key_cache, value_cache, part, groups[0], scaling)
    result = nothing(query, query.shape[0], value_cache.shape[-1])
    for group in groups:
        for rows in group.rows.split(hpu_sizes.MOST_ROWS):
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
        for rows, spans in zip(query.split(hpu_sizes.MOST_ROWS), part.row_spans.split(hpu_sizes.MOST_ROWS), strict=True)
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
