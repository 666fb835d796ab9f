"""States of tiles, each made of the one before it: a program keeps a part of a state in registers from tile to tile."""

import triton
import triton.language as tl


@triton.jit
def carry_tiles(
    loaded,
    added,
    decay,
    replaced,
    before,
    states,
    tile_sources,
    tile_targets,
    tiles,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REPLACES: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """A program for each head, ROW_BLOCK rows and COLUMN_BLOCK columns. If REPLACES, ROW_BLOCK is all rows, and a
    product takes PART of them at a time.

    loaded: [tiles, HEADS, ROWS, COLUMNS], the states that requests begin with. Other tensors as in `TileChange` and
    `StateRows`, contiguous; before: like `added`, written.
    """
    column_blocks: tl.constexpr = (COLUMNS + COLUMN_BLOCK - 1) // COLUMN_BLOCK
    row_blocks: tl.constexpr = (ROWS + ROW_BLOCK - 1) // ROW_BLOCK
    head = tl.program_id(0) // (row_blocks * column_blocks)
    row = tl.program_id(0) // column_blocks % row_blocks * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    column = tl.program_id(0) % column_blocks * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    size: tl.constexpr = HEADS * ROWS * COLUMNS
    place = head * ROWS * COLUMNS + row[:, None] * COLUMNS + column[None, :]
    state = tl.zeros((ROW_BLOCK, COLUMN_BLOCK), tl.float32)
    for tile in range(tiles):
        if tl.load(tile_sources + tile) >= 0:
            state = tl.load(loaded + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(before + place, state, mask=inside)
        new = state * tl.load(decay + tile * HEADS + head) + tl.load(added + place, mask=inside, other=0.0)
        if REPLACES:
            # what other threads have stored
            tl.debug_barrier()
            for first in range(0, ROWS, PART):
                other = first + tl.arange(0, PART)
                is_row = other < ROWS
                square = head * ROWS * ROWS + row[:, None] * ROWS + other[None, :]
                matrix = tl.load(replaced + square, mask=(row < ROWS)[:, None] & is_row[None, :], other=0.0)
                part = head * ROWS * COLUMNS + other[:, None] * COLUMNS + column[None, :]
                old = tl.load(before + part, mask=is_row[:, None] & (column < COLUMNS)[None, :], other=0.0)
                new = new - tl.dot(matrix, old, input_precision="ieee")
            replaced += HEADS * ROWS * ROWS
        state = new
        target = tl.load(tile_targets + tile).to(tl.int64)
        tl.store(states + target * size + place, state.to(states.dtype.element_ty), mask=inside)
        # places of all tiles together may not fit into 32 bits
        loaded += size
        before += size
        added += size
