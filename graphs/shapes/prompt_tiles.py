"""Causal attention at static shapes: rows in tiles, each with the tiles before it that it looks back on.

The start of a request is a run-time input, and so is how far a tile looks back. A bucket's *max prompt tiles* are
static: the most tiles that the rows of one request are in. If every request has that many, `levels(rows, max_tiles)[j]`
tiles look back on `j` tiles or more; with shorter requests there are never more, at any `j`. So a step's tiles, those
that look back furthest first, fit one by one into places of a fixed depth, and the work follows the requests' lengths.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Count = TypeVar("Count", int, NDArray[np.int64])

# Rows of a tile. Half a tile is computed at a time, because the matrix engine takes 128 rows; a tile reads its keys
# once.
TILE_ROWS = 256
# One tile in this number may be spent on starting a request with a tile of its own.
TILES_PER_SPARE = 32
ALL_TILES = 1 << 30
"""No bound: any row of the shape may look back on all rows before it."""


def flat_tiles(rows: Count) -> Count:
    """Returns the tiles of `rows` consecutive rows."""
    return -(-rows // TILE_ROWS)


def spare_tiles(rows: int) -> int:
    """Returns the tiles that a step of `rows` rows may have beyond `flat_tiles`."""
    return -(-rows // (TILES_PER_SPARE * TILE_ROWS))


def levels(rows: int, max_tiles: int) -> tuple[int, ...]:
    """Returns [max_tiles], how many tiles of a bucket of `rows` rows look back on j = 0, 1, .. tiles or more."""
    tiles = flat_tiles(rows) + spare_tiles(rows)
    # a request that begins inside a tile leaves no tile that looks back on nothing; short ones can begin with their own
    own = max_tiles <= 2
    spanned = max_tiles if own else max_tiles - 1
    whole, rest = divmod(tiles, spanned)
    found = tuple(whole * (spanned - back) + max(0, rest - back) for back in range(spanned))
    return found if own else (tiles, *found)


def is_bounded(rows: int, max_tiles: int) -> bool:
    """True if the bound saves enough. Near the number of all tiles, slices cost less than tiles placed at run time."""
    return 4 * max_tiles <= 3 * flat_tiles(rows)
