"""New tokens among themselves: tiles of rows on and below the diagonal of each slice, equal slices side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl import hpu_tile
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_tile import (
    Scaling,
    accumulate,
    attend_tile,
    causal_rows,
    kv_tokens,
    score_tokens,
    slice_tokens,
)
from vllm_gaudi_ucm.ops.unified_attention.parts import CausalPart, CausalSlice, CausalTiles, Partial


class Rows(NamedTuple):
    """Rows `first + i * step + lo` to `first + i * step + hi` for i < slices: the same rows of adjacent slices."""

    first: int
    slices: int
    step: int
    lo: int
    hi: int

    @property
    def end(self) -> int:
        return self.first + (self.slices - 1) * self.step + self.hi

    def of(self, tensor: Tensor) -> Tensor:
        """[slices, hi - lo, ...], a view."""
        begin = self.first + self.lo
        if self.slices == 1:
            return tensor[begin : begin + self.hi - self.lo][None]
        return tensor[begin : self.end].unfold(0, self.hi - self.lo, self.step).movedim(-1, 1)


class CausalTile(NamedTuple):
    """Rows that are computed together, and the keys that they are multiplied with, equally many for each slice."""

    rows: Rows
    keys: tuple[Rows, ...]


def causal_tiles(part: CausalPart, key: Tensor, value: Tensor, heads: int, apart: int) -> Iterator[CausalTile]:
    """Tiles that cover the rows of all slices once. Slices that begin before row `apart` are not put side by side."""
    slices = sorted(one for one in part.slices if one.query_hi > one.query_lo)
    tokens = slice_tokens(key, value)
    place = 0
    while place < len(slices):
        count = 1 if slices[place].query_lo < apart else _alike(slices, place)
        one = slices[place]
        yield from _tiles(one, count, heads, max(1, tokens // max(1, one.query_hi - one.key_lo)))
        place += count


def _alike(slices: list[CausalSlice], place: int) -> int:
    """How many slices from this one on are the same square, one behind the other."""
    lo, hi, key_lo, key_hi = slices[place]
    step, count = hi - lo, 1
    for other in slices[place + 1 :]:
        offset = count * step
        if other != (lo + offset, hi + offset, key_lo + offset, key_hi + offset):
            break
        count += 1
    return count


def _tiles(one: CausalSlice, count: int, heads: int, most: int) -> Iterator[CausalTile]:
    """Of `count` equal slices, at most so many at a time: all their rows, while their keys are on the chip."""
    lo, hi, key_lo, key_hi = one
    step = hi - lo
    length = causal_rows(step, hi - key_lo)
    for first in range(0, count, most):
        here = min(most, count - first)
        for row_lo in range(lo, hi, length):
            row_hi = min(row_lo + length, hi)
            last = min(key_hi, row_hi)
            width = score_tokens(heads, row_hi - row_lo)
            together = max(1, width // max(1, last - key_lo))
            for begin in range(0, here, together):
                rows = Rows((first + begin) * step, min(together, here - begin), step, row_lo, row_hi)
                ranges = ((at, min(at + width, last)) for at in range(key_lo, last, width))
                yield CausalTile(rows, tuple(rows._replace(lo=at, hi=end) for at, end in ranges))


def attend_causal(
    query: Tensor, key: Tensor, value: Tensor, part: CausalPart, scaling: Scaling, tile: CausalTile
) -> Partial | None:
    """Partial [slices, rows, heads, ...] of a tile, None where it has no keys."""
    position = torch.arange(query.shape[0], device=query.device)
    rows, own = scaling.apply(tile.rows.of(query)), tile.rows.of(part.groups)[..., None]
    row_position = tile.rows.of(position)[..., None]
    found: Partial | None = None
    for keys in tile.keys:
        visible = (own == keys.of(part.groups)[:, None]) & (own >= 0)
        visible = visible & (keys.of(position)[:, None] <= row_position)
        piece = attend_tile(rows, keys.of(key), keys.of(value), visible)
        found = accumulate(found, piece)
    return found


class TileGroup(NamedTuple):
    """Tiles of a step that may look back equally far: first, last int64 [tiles, 1], `depth` tiles of rows before."""

    first: Tensor
    last: Tensor
    depth: int


class Half(NamedTuple):
    """The rows that are computed at a time: int64 [tiles, rows]; after the last one of a tile it is repeated.

    end: keys from `first + end` on are later ones.
    """

    rows: Tensor
    end: int


class Window(NamedTuple):
    """Keys [tiles, keys] that begin `begin` rows from the first of each tile; `row` stands for those before row 0."""

    place: Tensor
    row: Tensor
    begin: int

    def visible(self, half: Half, groups: Tensor) -> Tensor:
        """bool [tiles, rows, keys of the half]."""
        place, keys = self.place[:, None, : self.count(half)], self.row[:, : self.count(half)]
        own, theirs = gather(groups, half.rows)[..., None], gather(groups, keys)[:, None]
        return (own == theirs) & (own >= 0) & (place >= 0) & (place <= half.rows[..., None])

    def count(self, half: Half) -> int:
        """Keys that are no later than the half's rows."""
        return max(0, min(self.row.shape[1], half.end - self.begin))


def attend_causal_tiles(
    query: Tensor, key: Tensor, value: Tensor, groups: Tensor, tiles: CausalTiles, scaling: Scaling
) -> Iterator[tuple[Tensor, Partial]]:
    """(rows [tiles, rows], their Partial [tiles, rows, heads, ...]), until every row was among them."""
    width = score_tokens(query.shape[1], _half_rows(tiles))
    for group in tile_groups(tiles, width):
        parts = halves(tiles, group)
        sums: list[Partial | None] = [None] * len(parts)
        for window in windows(tiles, group, width, groups.shape[0]):
            keys, values = gather(key, window.row), gather(value, window.row)
            for place, half in enumerate(parts):
                if count := window.count(half):
                    rows = scaling.apply(gather(query, half.rows))
                    piece = attend_tile(rows, keys[:, :count], values[:, :count], window.visible(half, groups))
                    sums[place] = accumulate(sums[place], piece)
        for half, found in zip(parts, sums, strict=True):
            assert found is not None, "a tile's own rows are keys of it"
            yield half.rows, found


def tile_groups(tiles: CausalTiles, width: int) -> Iterator[TileGroup]:
    """Every tile in one group, as many side by side as need `width` keys together."""
    lo = 0
    for depth in reversed(range(len(tiles.levels))):
        most = max(1, width // ((depth + 1) * tiles.rows))
        for first in range(lo, tiles.levels[depth], most):
            here = slice(first, min(first + most, tiles.levels[depth]))
            yield TileGroup(tiles.first[here, None], tiles.last[here, None], depth)
        lo = max(lo, tiles.levels[depth])


def halves(tiles: CausalTiles, group: TileGroup) -> list[Half]:
    """The rows of a group's tiles in portions for the matrix engine: earlier ones need fewer keys."""
    step, found = _half_rows(tiles), []
    for lo in range(0, tiles.rows, step):
        end = min(lo + step, tiles.rows)
        rows = group.first + torch.arange(lo, end, device=group.first.device)
        found.append(Half(torch.minimum(rows, group.last), end))
    return found


def windows(tiles: CausalTiles, group: TileGroup, width: int, num_rows: int) -> Iterator[Window]:
    """All keys of a group's tiles, at most `width` of each at a time."""
    for begin in range(-group.depth * tiles.rows, tiles.rows, width):
        end = min(begin + width, tiles.rows)
        place = group.first + torch.arange(begin, end, device=group.first.device)
        yield Window(place, place.clamp(0, num_rows - 1), begin)


def gather(tensor: Tensor, index: Tensor) -> Tensor:
    """[*index.shape, ...] rows of a tensor."""
    return tensor.index_select(0, index.flatten()).unflatten(0, index.shape)


def _half_rows(tiles: CausalTiles) -> int:
    return min(tiles.rows, hpu_tile.TILE)


Kernel = Callable[..., Tensor]
"""`FusedSDPA.apply`."""


def fused_causal(
    query: Tensor, key: Tensor, value: Tensor, part: CausalPart, scale: float, out: Tensor, kernel: Kernel
) -> None:
    """Writes the rows of all tiles, which are all there are, or of all slices; zeros to the others."""
    if part.tiles is not None:
        _fused_tiles(query, key, value, part.groups, part.tiles, scale, out, kernel)
        return
    slices = sorted(part.slices)
    position = torch.arange(query.shape[0], device=query.device)
    for lo, hi in zip(
        [0, *(one.query_hi for one in slices)], [*(one.query_lo for one in slices), len(out)], strict=True
    ):
        out[lo:hi].zero_()
    for rows, keys in _ranges(slices):
        own = part.groups[rows, None]
        visible = (own == part.groups[None, keys]) & (own >= 0) & (position[None, keys] <= position[rows, None])
        out[rows] = _attend(query[None, rows], key[None, keys], value[None, keys], visible[None], scale, kernel)[0]


def _ranges(slices: list[CausalSlice]) -> Iterator[tuple[slice, slice]]:
    """(rows, keys) of calls: as the square at the end of a slice is half wasted, short ones are cut further."""
    for query_lo, query_hi, key_lo, key_hi in slices:
        step = causal_rows(query_hi - query_lo, query_hi - key_lo)
        for lo in range(query_lo, query_hi, max(1, step)):
            hi = min(lo + step, query_hi)
            yield slice(lo, hi), slice(key_lo, min(key_hi, hi))


def _fused_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Tensor,
    tiles: CausalTiles,
    scale: float,
    out: Tensor,
    kernel: Kernel,
) -> None:
    """Tiles of a group are the batch of a call, as many as have so many keys."""
    # beside the keys and values as gathered there are those without what is broken
    for group in tile_groups(tiles, kv_tokens(key, value) // 2):
        (window,) = windows(tiles, group, (group.depth + 1) * tiles.rows, groups.shape[0])
        keys, values = gather(key, window.row), gather(value, window.row)
        for half in halves(tiles, group):
            count = window.count(half)
            visible = window.visible(half, groups)
            found = _attend(gather(query, half.rows), keys[:, :count], values[:, :count], visible, scale, kernel)
            out.index_copy_(0, half.rows.flatten(), found.flatten(0, 1))


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, kernel: Kernel) -> Tensor:
    """[batch, rows, heads, ...] of query [batch, rows, heads, dim] over key and value [batch, keys, kv_heads, dim].

    visible: bool [batch, rows, keys]. What a row does not see is masked by adding the lowest number, so it must be
    finite, and a row that sees nothing gets a mean of everything: both are put right here.
    """
    broken = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    key, value = (tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in (key, value))
    bias = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
    bias = bias.masked_fill(~visible, torch.finfo(query.dtype).min)
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    found = kernel(*heads_first, bias[:, None], 0.0, False, scale, "None", False).transpose(1, 2)
    tainted = visible.to(query.dtype) @ broken.to(query.dtype) > 0
    found = found.unflatten(2, (key.shape[2], -1)).masked_fill(tainted[..., None, None], float("nan")).flatten(2, 3)
    return found.masked_fill(~visible.any(-1)[..., None, None], 0)
