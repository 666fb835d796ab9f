"""Which shared blocks each tile of rows uses: those that all of its rows see whole first, then those seen in part."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_columns", "lo_span", "hi_span"])
def list_columns(
    order,
    row_spans,
    blocks,
    lo,
    hi,
    columns,
    column_blocks,
    counts,
    whole_counts,
    num_columns,
    lo_span,
    lo_column,
    hi_span,
    hi_column,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile per program. order: int32 [tiles * ROWS] rows, or -1; row_spans, blocks, lo, hi as in SharedPart.

    columns, column_blocks: int32 [tiles, num_columns], the first `counts[tile]` are written; of these the first
    `whole_counts[tile]` are seen whole.
    """
    tile = tl.program_id(0)
    lane = tl.arange(0, ROWS_PAD)
    row = tl.load(order + tile * ROWS + lane, mask=lane < ROWS, other=-1)
    real = row >= 0
    span = tl.load(row_spans + row, mask=real, other=0).to(tl.int64)
    lists = tile.to(tl.int64) * num_columns
    found = 0
    whole_found = 0
    for partly in tl.static_range(2):
        for first in range(0, num_columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = column < num_columns
            mask = real[:, None] & inside[None, :]
            begin = tl.load(lo + span[:, None] * lo_span + column[None, :] * lo_column, mask=mask, other=0)
            end = tl.load(hi + span[:, None] * hi_span + column[None, :] * hi_column, mask=mask, other=0)
            begin, end = tl.maximum(begin, 0), tl.minimum(end, BLOCK_SIZE)
            seen = tl.max(tl.where(mask & (end > begin), 1, 0), 0)
            whole = tl.min(tl.where(real[:, None] & ((begin > 0) | (end < BLOCK_SIZE)), 0, 1), 0)
            taken = seen * (1 - whole) if partly else seen * whole
            place = found + tl.cumsum(taken, 0) - taken
            block = tl.load(blocks + column, mask=inside, other=0).to(tl.int32)
            keep = inside & (taken > 0)
            tl.store(columns + lists + place, column, mask=keep)
            tl.store(column_blocks + lists + place, block, mask=keep)
            found += tl.sum(taken, 0)
        if partly == 0:
            whole_found = found
    tl.store(counts + tile, found)
    tl.store(whole_counts + tile, whole_found)
