"""Two products of adapters: of rows with the matrices A, and of their results with the matrices B.

Both take slots, int64 [rows]: the adapter of each row, below 0 for none. RANK: rank of every slot. ROWS: rows of a
program. Columns of the first product are slot * RANK + place. A row has only the columns of its own slot, so RANK
numbers for each slice. A program without such a row ends at once. COMPUTE: the dtype that is multiplied.
EARLY: the kernel starts before the one ahead has ended, and waits for it.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["rows"])
def narrow_rows(
    x,
    down,
    slots,
    out,
    rows,
    depth,
    columns,
    x_row,
    SPAN: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    COMPUTE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """x [rows, depth] times down [slices * columns, depth], in pieces of SPAN of the depth.

    out: float32 [pieces, rows, slices * RANK]; rows without an adapter are not written. columns: slots * RANK.
    Programs: (tiles of the columns, tiles of the rows * slices, pieces).
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    tiles = tl.cdiv(rows, ROWS)
    row = tl.program_id(1) % tiles * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1) // tiles
    slices = tl.num_programs(1) // tiles
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int32)
    # columns beyond the last are of no slot
    owner = tl.where(column < columns, column // RANK, -2)
    wanted = slot[:, None] == owner[None, :]
    if tl.max(tl.max(wanted.to(tl.int32), 1), 0) == 0:
        return
    matrix = down + (part * columns + column).to(tl.int64)[None, :] * depth
    given = x + row.to(tl.int64)[:, None] * x_row
    first = tl.program_id(2) * SPAN
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(first, first + SPAN, DEPTH):
        at = begin + tl.arange(0, DEPTH)
        inside = at < depth
        a = tl.load(given + at[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(matrix + at[:, None], mask=(column < columns)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a.to(COMPUTE), b.to(COMPUTE), total, input_precision="ieee")
    place = (tl.program_id(2) * rows + row).to(tl.int64) * (slices * RANK) + part * RANK
    tl.store(out + place[:, None] + (column % RANK)[None, :], total, mask=wanted)


@triton.jit(do_not_specialize=["rows"])
def widen_rows(
    y,
    narrow,
    up,
    slots,
    rows,
    columns,
    y_row,
    start_1,
    start_2,
    start_3,
    start_4,
    PIECES: tl.constexpr,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    COMPUTE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Adds narrow times up [outputs, columns] to y [rows, outputs], in place.

    narrow: [PIECES, rows, SLICES * RANK], whose pieces are added up. Slice i has the outputs from start_i, the first
    from 0, up to the next one's; beyond the last slice starts are the number of all outputs.
    Programs: (tiles of the outputs of the widest slice, slices, tiles of the rows).
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(1)
    begin, end = 0, start_1
    if part == 1:
        begin, end = start_1, start_2
    elif part == 2:
        begin, end = start_2, start_3
    elif part == 3:
        begin, end = start_3, start_4
    output = begin + tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int32)
    if (begin + tl.program_id(0) * OUTPUTS >= end) | (tl.max(slot, 0) < 0):
        return
    matrix = up + output.to(tl.int64)[None, :] * columns
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, columns, DEPTH):
        column = first + tl.arange(0, DEPTH)
        wanted = (slot[:, None] == (column // RANK)[None, :]) & (column < columns)[None, :]
        if tl.max(tl.max(wanted.to(tl.int32), 1), 0) > 0:
            place = row.to(tl.int64)[:, None] * (SLICES * RANK) + part * RANK + (column % RANK)[None, :]
            a = tl.load(narrow + place, mask=wanted, other=0.0).to(tl.float32)
            for piece in range(1, PIECES):
                step = piece * rows * (SLICES * RANK)
                a += tl.load(narrow + step + place, mask=wanted, other=0.0).to(tl.float32)
            valid = (output < end)[None, :] & (column < columns)[:, None]
            b = tl.load(matrix + column[:, None], mask=valid, other=0.0)
            total = tl.dot(a.to(COMPUTE), b.to(COMPUTE), total, input_precision="ieee")
    place = y + row.to(tl.int64)[:, None] * y_row + output[None, :]
    mask = (slot >= 0)[:, None] & (output < end)[None, :]
    found = tl.load(place, mask=mask, other=0.0).to(tl.float32) + total
    tl.store(place, found.to(y.dtype.element_ty), mask=mask)
