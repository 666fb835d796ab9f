"""Cuts the rows of a step into tiles for static causal attention, and finds the least reach of a bucket for them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.shapes import prompt_tiles
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import flat_tiles, levels, spare_tiles

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan


class RowTiles(NamedTuple):
    """Tiles that cover the rows of a step once, in flat order.

    starts: int64 [tiles] first row; a tile has `TILE_ROWS` rows, or fewer if the next one begins earlier.
    depths: int64 [tiles] number of tiles of earlier rows that its rows look back on.
    reach: the least reach of a bucket that holds them (`graphs.causal_tiles`).
    """

    starts: NDArray[np.int64]
    depths: NDArray[np.int64]
    reach: int

    def places(self, rows: int, tiles: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (first, last) rows [tiles] for a bucket of `rows` rows; tiles that look back furthest come first.

        Rows beyond the step's rows are in tiles, too. A spare place is empty: its first row is 1 and its last row is 0,
        both of which are valid indices.
        """
        size = prompt_tiles.TILE_ROWS
        starts = np.concatenate([self.starts, np.arange(int(self.starts[-1]) + size, rows, size)])
        last = np.minimum(np.append(starts[1:], rows), starts + size) - 1
        order = np.argsort(-self.depths, kind="stable")
        order = np.concatenate([order, np.arange(len(order), len(starts))])
        places = np.zeros((2, tiles), np.int64)
        places[0] = 1
        places[:, : len(starts)] = starts[order], last[order]
        return places[0], places[1]


def row_tiles(plan: UnifiedPlan | None) -> RowTiles:
    """Returns the tiles of a step; None stands for a step without rows."""
    return cut_rows([1] if plan is None else plan.query_start[plan.num_single :].tolist())


def cut_rows(bounds: list[int]) -> RowTiles:
    """Cuts rows [0, bounds[-1]); [bounds[i], bounds[i + 1]) belong to a request, those before bounds[0] are single
    rows.

    A request that would span one tile more than the longest request needs begins with a separate tile, as long as there
    are spare tiles for the rows that this leaves out.
    """
    rows = bounds[-1]
    most = flat_tiles(rows)
    if most <= 1:
        return RowTiles(np.zeros(1, np.int64), np.zeros(1, np.int64), 1)
    longest = max((flat_tiles(end - begin) for begin, end in pairwise(bounds)), default=1)
    aligned = _cut(bounds, longest, spare_tiles(rows) * prompt_tiles.TILE_ROWS)
    reach = _least_reach(aligned[1], rows, longest, most)
    if reach == longest:
        return _tiles(aligned, reach)
    flat = _cut(bounds, longest, 0)
    flat_reach = _least_reach(flat[1], rows, longest, most)
    return _tiles(aligned, reach) if reach is not None and reach <= (flat_reach or most) else _tiles(flat, flat_reach)


def _cut(bounds: list[int], longest: int, spare: int) -> tuple[list[int], list[int]]:
    """Returns (starts, depths); `spare` rows may be left out of tiles to begin a request with a separate tile."""
    starts, depths = [], []
    at = 0
    for begin, end, single in ((0, bounds[0], True), *((*pair, False) for pair in pairwise(bounds))):
        inside = at - begin
        if 0 < inside <= spare and flat_tiles(end - at) >= longest:
            spare, at = spare - inside, begin
        while at < end:
            starts.append(at)
            depths.append(0 if single else flat_tiles(at - begin))
            at += prompt_tiles.TILE_ROWS
    return starts, depths


def _least_reach(depths: list[int], rows: int, least: int, most: int) -> int | None:
    """Returns the least reach whose levels hold tiles of these depths; None if no reach up to `most` does."""
    deepest = max(depths)
    deep = list(accumulate(reversed(np.bincount(depths).tolist())))[::-1]
    candidates = range(max(least, deepest + 1), most + 1)

    def holds(reach: int) -> bool:
        return all(count <= room for count, room in zip(deep, levels(rows, reach), strict=False))

    # a reach that holds them is followed only by reaches that do
    place = bisect_left(candidates, True, key=holds)
    return candidates[place] if place < len(candidates) else None


def _tiles(cut: tuple[list[int], list[int]], reach: int | None) -> RowTiles:
    assert reach is not None, "tiles one behind the other fit a reach of as many"
    return RowTiles(np.array(cut[0], np.int64), np.array(cut[1], np.int64), reach)
