"""Causal attention at static shapes: rows in tiles, each with the tiles before it that it looks back on.

How far a tile looks back is data, because where a request begins is. What a bucket knows is its *reach*: the most tiles
that the rows of a request lie in. If all requests lie in as many, `levels(rows, reach)[j]` tiles look back on `j` tiles
or more; if some lie in fewer, there are no more of these, at any `j`. So a step's tiles, those that look back furthest
first, fit one by one into places of a fixed depth, and the multiplied pairs follow the requests' lengths.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Count = TypeVar("Count", int, NDArray[np.int64])

# Rows of a tile. Half as many are computed at a time, since the matrix engine takes 128; a tile reads its keys once.
TILE_ROWS = 256
# One tile in so many may be spent on beginning a request with a tile of its own.
TILES_PER_SPARE = 32
ALL_TILES = 1 << 30
"""The reach of a shape that says nothing of it: any of its rows may look back on all before it."""


def flat_tiles(rows: Count) -> Count:
    """Tiles of so many rows, one behind the other."""
    return -(-rows // TILE_ROWS)


def spare_tiles(rows: int) -> int:
    """Tiles that a step of so many rows may have beyond `flat_tiles`."""
    return -(-rows // (TILES_PER_SPARE * TILE_ROWS))


def levels(rows: int, reach: int) -> tuple[int, ...]:
    """[reach] of the tiles of a bucket of so many rows, how many look back on j = 0, 1, .. tiles or more."""
    tiles = flat_tiles(rows) + spare_tiles(rows)
    # a request that begins inside a tile leaves none that looks back on nothing; short ones can begin with their own
    own = reach <= 2
    spanned = reach if own else reach - 1
    whole, rest = divmod(tiles, spanned)
    found = tuple(whole * (spanned - back) + max(0, rest - back) for back in range(spanned))
    return found if own else (tiles, *found)


def is_bounded(rows: int, reach: int) -> bool:
    """Whether the reach spares enough: near that of all rows, slices of these cost less than tiles that data places."""
    return 4 * reach <= 3 * flat_tiles(rows)
