"""New tokens among themselves where a bucket says how far rows look back: gathered tiles, those alike side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl import hpu_sizes
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_sizes import score_tokens
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_tile import Scaling, accumulate, attend_tile
from vllm_gaudi_ucm.ops.unified_attention.parts import CausalTiles, Partial


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
    return min(tiles.rows, hpu_sizes.TILE)
