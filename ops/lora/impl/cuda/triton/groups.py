"""Rows of a step grouped by adapter, in tiles: all rows of a tile have one adapter."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "tiles"])
def group_rows(slots, order, owners, rows, tiles, SPREAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each slot, which reads all rows twice: no program waits for another.

    slots: int64 [rows]; a row whose number no program has is in no tile. SPREAD: a power of two, at
    least the number of slots.
    order: int32 [tiles * ROWS], the rows of each tile, -1 after the last row of a slot; not written in tiles without a
    slot. owners: int32 [tiles], the slot of each tile; -1 after the last one.
    """
    slot = tl.program_id(0)
    index = tl.arange(0, SPREAD)
    counts = tl.zeros((SPREAD,), tl.int32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        number = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int32)
        counts += tl.sum((number[:, None] == index[None, :]).to(tl.int32), 0)
    needed = (counts + ROWS - 1) // ROWS
    start = tl.sum(tl.where(index < slot, needed, 0), 0)
    end = start + tl.sum(tl.where(index == slot, needed, 0), 0)
    for first in range(start, end, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        tl.store(owners + tile, tl.zeros((BLOCK,), tl.int32) + slot, mask=tile < end)
    if slot == tl.num_programs(0) - 1:
        for first in range(end, tiles, BLOCK):
            tile = first + tl.arange(0, BLOCK)
            tl.store(owners + tile, tl.full((BLOCK,), -1, tl.int32), mask=tile < tiles)
    place = start * ROWS
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        mine = (tl.load(slots + row, mask=row < rows, other=-1).to(tl.int32) == slot).to(tl.int32)
        rank = tl.cumsum(mine, 0)
        tl.store(order + place + rank - 1, row, mask=mine > 0)
        place += tl.sum(mine, 0)
    left = place + tl.arange(0, ROWS)
    tl.store(order + left, tl.full((ROWS,), -1, tl.int32), mask=left < end * ROWS)
