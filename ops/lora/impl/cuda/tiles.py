"""Tiles of a step's rows by adapter, and the sizes of the programs that multiply them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Numbers that the programs of grouping compare at once.
COMPARED = 16384
# Programs of the first product that keep all multiprocessors busy, the least depth of one, and the most pieces, which
# the second product adds up.
PROGRAMS, LEAST_SPAN, MOST_PIECES = 256, 256, 32
# Numbers of the first product that a program of the second one adds up at once.
ADDED = 8192


class RowTiles(NamedTuple):
    """The rows of a step in tiles of `height` places; all rows of a tile have the same adapter.

    rows: int64 [rows], the slot of each row. order: int32 [tiles * height], the row in each place, -1 for none.
    owners: int32 [tiles], the slot of each tile, -1 for none; order is then not written there.
    """

    rows: Tensor
    order: Tensor
    owners: Tensor
    height: int


class Sizes(NamedTuple):
    """Sizes of a layer's programs.

    columns, depth: tile of the first product, with the rows of a tile. span: depth of a program; pieces: their number.
    outputs, rank: tile of the second product. chunk: pieces that it adds up at once.
    warps: of a program of the second product.
    """

    columns: int
    depth: int
    span: int
    pieces: int
    outputs: int
    rank: int
    chunk: int
    warps: int


def group_rows(rows: Tensor, slots: int) -> RowTiles:
    """Groups rows by slot on the device, in one launch. rows: int64 [rows]."""
    from vllm_gaudi_ucm.ops.lora.impl.cuda.triton import groups

    count = len(rows)
    height = _height(count)
    # every slot may have a tile that is partly filled
    tiles = count // height + min(slots, count)
    order = torch.empty(tiles * height, dtype=torch.int32, device=rows.device)
    owners = torch.empty(tiles, dtype=torch.int32, device=rows.device)
    if count:
        spread = _power(slots, 1)
        block = max(16, min(1024, COMPARED // spread, _power(count, 16)))
        groups.group_rows[(slots,)](rows, order, owners, count, tiles, SPREAD=spread, ROWS=height, BLOCK=block)
    return RowTiles(rows, order, owners, height)


def choose_sizes(tiles: RowTiles, depth: int, slices: int, rank: int, itemsize: int) -> Sizes:
    """Chooses sizes. Few rows are bound by latency: a program loads all of its operands at once. Many are bound by
    reading rows and results.
    """
    height = tiles.height
    columns = min(128, _power(slices * rank, 16))
    deep = (512 if height == 16 and columns <= 64 else 256) // itemsize
    across = len(tiles.owners) * -(-slices * rank // columns)
    pieces = max(1, min(PROGRAMS // across, depth // LEAST_SPAN, MOST_PIECES))
    span = -(-depth // (pieces * deep)) * deep
    pieces = -(-depth // span)
    return Sizes(columns, deep, span, pieces, *_second(height, pieces, rank))


def choose_second(tiles: RowTiles, rank: int) -> Sizes:
    """Chooses sizes of the second product alone, of one piece."""
    return Sizes(0, 0, 0, 1, *_second(tiles.height, 1, rank))


def _second(height: int, pieces: int, rank: int) -> tuple[int, int, int, int]:
    deep = min(64, _power(rank, 16))
    chunk = max(1, min(_power(pieces, 1), ADDED // (height * deep)))
    outputs, warps = (128, 4) if height < 64 else (256, 8)
    return outputs, deep, chunk, warps


def _height(rows: int) -> int:
    """Returns the rows of a tile: of few rows, only a few have the same adapter."""
    return 16 if rows <= 64 else 32 if rows <= 256 else 64


def _power(number: int, least: int) -> int:
    """Returns the next power of two."""
    return max(least, 1 << (number - 1).bit_length())
