"""Two products of adapters: of rows with the matrices A, and of their results with the matrices B. The first one may
also come from the layer's own product, which then has columns for all slots.

Both take the tiles of `groups.py`: order, int32 [tiles * ROWS], and owners, int32 [tiles]. A program loads the matrices
of one adapter once for all rows of its tile; a program of a tile without a slot ends at once.
RANK: rank of every slot. COMPUTE: the dtype that is multiplied.
EARLY: the kernel starts before the one ahead has ended, and waits for it. The second product loads its matrices before
it waits. That is safe because the first one signals only after its own wait: whatever wrote the matrices and the tiles
has ended by then.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def narrow_rows(
    x,
    down,
    order,
    owners,
    out,
    depth,
    slots,
    x_row,
    SPAN: tl.constexpr,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    COMPUTE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """x [rows, depth] times down [SLICES * slots * RANK, depth], in pieces of SPAN of the depth.

    out: float32 [pieces, tiles * ROWS, SLICES * RANK]; places without a row are not written.
    Programs: (tiles, pieces, tiles of the columns of all slices).
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    tile, piece = tl.program_id(0), tl.program_id(1)
    slot = tl.load(owners + tile)
    if slot < 0:
        return
    place = tile * ROWS + tl.arange(0, ROWS)
    row = tl.load(order + place)
    live = row >= 0
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < SLICES * RANK
    line = (column // RANK * slots + slot) * RANK + column % RANK
    given = x + tl.where(live, row, 0).to(tl.int64)[:, None] * x_row
    matrix = down + tl.where(valid, line, 0).to(tl.int64)[None, :] * depth
    first = piece * SPAN
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, SPAN, DEPTH):
        at = first + begin + tl.arange(0, DEPTH)
        inside = at < depth
        a = tl.load(given + at[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        b = tl.load(matrix + at[:, None], mask=valid[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a.to(COMPUTE), b.to(COMPUTE), total, input_precision="ieee")
    line_of = (piece * tl.num_programs(0) * ROWS + place).to(tl.int64) * (SLICES * RANK)
    tl.store(out + line_of[:, None] + column[None, :], total, mask=live[:, None] & valid[None, :])


@triton.jit
def widen_rows(
    y,
    narrow,
    up,
    order,
    owners,
    pieces,
    columns,
    y_row,
    narrow_row,
    narrow_slice,
    narrow_slot,
    start_1,
    start_2,
    start_3,
    start_4,
    BY_ROW: tl.constexpr,
    CHUNK: tl.constexpr,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    COMPUTE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Adds narrow times up [outputs, columns] to y [rows, outputs], in place. columns: slots * RANK.

    narrow: [pieces, tiles * ROWS, ...], whose pieces are added up, CHUNK of them at a time. BY_ROW: there is one piece,
    [rows, ...] in the order of y. narrow_row, narrow_slice, narrow_slot: numbers from a row, a slice, a slot to the
    next one.
    Slice i has the outputs from start_i, the first from 0, up to the next one's; beyond the last slice starts are the
    number of all outputs. DEPTH: numbers of the rank that are multiplied at once.
    Programs: (tiles of the outputs, each slice has its own; tiles).
    """
    if EARLY:
        gdc_launch_dependents()
    slot = tl.load(owners + tl.program_id(1))
    place = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # not written in tiles without a slot
    row = tl.where(slot >= 0, tl.load(order + place), -1)
    live = row >= 0
    # the slice that this tile of the outputs belongs to
    tile, part = tl.program_id(0), 0
    begin, end = 0, start_1
    count = tl.cdiv(start_1, OUTPUTS)
    if (SLICES > 1) & (tile >= count):
        tile, part, begin, end = tile - count, 1, start_1, start_2
        count = tl.cdiv(start_2 - start_1, OUTPUTS)
        if (SLICES > 2) & (tile >= count):
            tile, part, begin, end = tile - count, 2, start_2, start_3
            count = tl.cdiv(start_3 - start_2, OUTPUTS)
            if (SLICES > 3) & (tile >= count):
                tile, part, begin, end = tile - count, 3, start_3, start_4
    output = begin + tile * OUTPUTS + tl.arange(0, OUTPUTS)
    valid = (output < end) & (slot >= 0)
    matrix = up + output.to(tl.int64)[None, :] * columns + slot * RANK
    number = tl.arange(0, DEPTH)
    b = tl.load(matrix + number[:, None], mask=valid[None, :] & (number < RANK)[:, None], other=0.0)
    if EARLY:
        # of every program, also if it has no rows: when a kernel has ended, all kernels before it have ended
        gdc_wait()
    if slot < 0:
        return
    target = y + tl.where(live, row, 0).to(tl.int64)[:, None] * y_row + output[None, :]
    mask = live[:, None] & valid[None, :]
    before = tl.load(target, mask=mask, other=0.0)
    line = (tl.where(live, row, 0) if BY_ROW else place).to(tl.int64) * narrow_row
    line += part * narrow_slice + slot * narrow_slot
    step = (tl.num_programs(1) * ROWS).to(tl.int64) * narrow_row
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for deep in tl.static_range(0, RANK, DEPTH):
        number = deep + tl.arange(0, DEPTH)
        if deep > 0:
            b = tl.load(matrix + number[:, None], mask=valid[None, :] & (number < RANK)[:, None], other=0.0)
        wanted = live[:, None] & (number < RANK)[None, :]
        at = narrow + line[:, None] + number[None, :]
        a = tl.zeros((ROWS, DEPTH), tl.float32)
        for first in range(0, pieces, CHUNK):
            piece = first + tl.arange(0, CHUNK)
            every = at[None, :, :] + (piece.to(tl.int64) * step)[:, None, None]
            found = tl.load(every, mask=wanted[None, :, :] & (piece < pieces)[:, None, None], other=0.0)
            a += tl.sum(found.to(tl.float32), 0)
        total = tl.dot(a.to(COMPUTE), b.to(COMPUTE), total, input_precision="ieee")
    tl.store(target, (before.to(tl.float32) + total).to(y.dtype.element_ty), mask=mask)
