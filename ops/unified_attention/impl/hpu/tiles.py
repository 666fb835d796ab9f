"""New tokens among themselves, in tiles of rows that are placed at run time and look back as far as their levels
allow.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.blocks import add_to_rows, row_maxima
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.products import (
    LOWEST,
    Products,
    Seen,
    packed,
    value_dtype,
    weigh,
    without_garbage,
)
from vllm_gaudi_ucm.ops.unified_attention.parts import CausalTiles

# Products of a step. With four, the work stays within 1.3 times what prompts of the bucket's length need.
PRODUCTS = 4
PRODUCTS_BESIDE_SHARED = 3


class TileProduct(NamedTuple):
    """Rows [lo, hi) of tiles [first, last), times keys from `begin` to `end` of their window."""

    first: int
    last: int
    lo: int
    hi: int
    begin: int
    end: int


class TileWindow(NamedTuple):
    """rows: int64 [tiles, rows], padded by repeating the last one. keys: int64 [tiles, window] row of each key.

    hidden: bool [tiles, rows, window] keys that a row does not see; repeated rows see none.
    stale: bool [tiles, rows] repeated rows.
    """

    rows: Tensor
    keys: Tensor
    hidden: Tensor
    stale: Tensor


def tile_products(tiles: CausalTiles, most: int) -> list[TileProduct]:
    """A class of tiles for each part of the look-back, and parts of tiles if there are fewer classes than products."""
    reach = len(tiles.levels)
    classes = min(most, reach)
    bounds = [-(-reach * number // classes) for number in range(classes + 1)]
    found = []
    for number, (shallow, deep) in enumerate(pairwise(bounds)):
        first = tiles.levels[deep] if deep < reach else 0
        last = tiles.levels[shallow]
        parts = min(tiles.rows, most // classes + (number < most % classes))
        step = -(-tiles.rows // parts)
        for lo in range(0, tiles.rows if last > first else 0, step):
            hi = min(lo + step, tiles.rows)
            window = (reach - 1) * tiles.rows
            found.append(TileProduct(first, last, lo, hi, window - (deep - 1) * tiles.rows, window + hi))
    return found


def window_of(groups: Tensor, tiles: CausalTiles, first_rows: Tensor | None = None) -> TileWindow:
    """The rows of each tile, and all rows that the deepest tiles look back on. groups, first_rows: see CausalPart."""
    place = tiles.first[:, None] + torch.arange(tiles.rows, device=groups.device)
    rows = torch.minimum(place, tiles.last[:, None])
    back = (len(tiles.levels) - 1) * tiles.rows
    before = tiles.first[:, None] + torch.arange(-back, tiles.rows, device=groups.device)
    keys = before.clamp(0, groups.shape[0] - 1)
    own, theirs = (groups.index_select(0, index.flatten()).view(index.shape) for index in (rows, keys))
    stale = place > tiles.last[:, None]
    hidden = (own[..., None] != theirs[:, None]) | ((own < 0) | stale)[..., None]
    hidden = hidden | (before < 0)[:, None] | (before[:, None] > rows[..., None])
    if first_rows is not None:
        first = first_rows.index_select(0, rows.flatten()).view(rows.shape)
        hidden = hidden | (before[:, None] < first[..., None])
    return TileWindow(rows, keys, hidden, stale)


def attend_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: CausalTiles,
    window: TileWindow,
    products: Products,
    seen: Seen | None,
) -> Seen:
    """Adds the new tokens to what rows have seen. See `attend_blocks`; key, value: the new tokens."""
    kv_heads, num_rows, groups, _ = query.shape
    # the axis of tiles is outermost here, so that some tiles are a slice; entries are kv head * rows + row
    query = query.flatten(0, 1)
    first = torch.arange(0, kv_heads * num_rows, num_rows, device=query.device)[:, None]
    places = window.rows[:, None] + first  # [tiles, kv_heads, rows]
    rows = query.index_select(0, places.flatten()).unflatten(0, (-1, tiles.rows))
    key, value = without_garbage(key, value)
    key, value = products.key(key.transpose(0, 1)), packed(value.transpose(0, 1), value_dtype(value))
    index = (window.keys[:, None] + first).flatten()
    keys, values = (one.flatten(0, 1).index_select(0, index).unflatten(0, (rows.shape[0], -1)) for one in (key, value))
    pieces = []
    most = PRODUCTS if seen is None else PRODUCTS_BESIDE_SHARED
    for first_tile, last_tile, lo, hi, begin, end in tile_products(tiles, most):
        here, count = slice(first_tile * kv_heads, last_tile * kv_heads), hi - lo
        scores = products.scores(rows[here, lo:hi].flatten(1, 2), keys[here, begin:end])
        hidden = window.hidden[first_tile:last_tile, None, lo:hi, None, begin:end]
        scores = scores.view(-1, kv_heads, count, groups, end - begin).masked_fill(hidden, LOWEST)
        weights, top, total = weigh(scores.flatten(0, 2))
        out = torch.bmm(weights.view(-1, count * groups, end - begin).to(values.dtype), values[here, begin:end])
        mine = places[first_tile:last_tile, :, lo:hi].flatten()
        pieces.append((mine, out.view(*top.shape, -1), top, total))
    mine, out, top, total = (torch.cat(column) for column in zip(*pieces, strict=True))
    before = None if seen is None else Seen(*(one.transpose(0, 1).flatten(0, 1) for one in seen))
    maxima = row_maxima(before, mine, top, len(query))
    weight = torch.exp(top - maxima.index_select(0, mine))
    both = add_to_rows(before, maxima, mine, out * weight[..., None], total * weight)
    return Seen(*(one.unflatten(0, (kv_heads, num_rows)).transpose(0, 1) for one in both))
