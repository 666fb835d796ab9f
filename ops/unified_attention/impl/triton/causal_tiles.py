"""Tiles of the causal part: which keys a tile of rows sees, how tokens are loaded, where a finished tile goes."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def find_bounds(starts, bounds, rows, BLOCK_M: tl.constexpr):
    """For each tile of rows, int32 [tiles, 3]: first key that any row sees, first that all see, last row's end.

    Of rows that take part; a tile without any has the end 0. starts: see `attend_causal`.
    """
    tile = tl.program_id(0)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.load(starts + row, mask=row < rows, other=2147483647)
    active = start <= row
    tl.store(bounds + tile * 3, tl.min(tl.where(active, start, 2147483647), 0))
    tl.store(bounds + tile * 3 + 1, tl.max(tl.where(active, start, 0), 0))
    tl.store(bounds + tile * 3 + 2, tl.max(tl.where(active, row, -1), 0) + 1)


@triton.jit
def load_tile(
    tiles,
    tokens,
    first,
    head,
    row_stride,
    head_stride,
    rows,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Tokens [first, first + BLOCK_N) of a head, 0 beyond the last row."""
    if DESCRIBED:
        return tiles.load([first, head * DIM])
    else:
        n, d = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        places = tokens + n.to(tl.int64)[:, None] * row_stride + head * head_stride + d[None, :]
        return tl.load(places, mask=(n < rows)[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def store_tile(
    acc,
    top,
    total,
    first,
    active,
    head,
    rows,
    cached,
    out,
    out_tiles,
    acc_out,
    top_out,
    total_out,
    o_row,
    o_head,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALONE: tl.constexpr,
    SAVES: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Rows [first, first + BLOCK_M) of a head to the result, or their sums to scratch; see `attend_causal`."""
    # a row that takes no part may have summed up keys: what is not finite there is in `broken` and computed again
    inverse = tl.where(active, 1.0 / tl.where(total == 0.0, 1.0, total), 0.0)
    result = (acc * inverse[:, None]).to(out.dtype.element_ty)
    if DESCRIBED and ALONE:
        out_tiles.store([first, head * VALUE_DIM], result)
    else:
        row = first + tl.arange(0, BLOCK_M)
        row64, e = row.to(tl.int64), tl.arange(0, BLOCK_V)
        in_out = row < rows
        if not ALONE:
            in_out = active
        if SAVES:
            has_more = tl.load(cached + row, mask=active, other=0) > 0
            in_out = in_out & (has_more == 0)
            saved = active & has_more
            place = row64 * HEADS + head
            tl.store(top_out + place, top, mask=saved)
            tl.store(total_out + place, total, mask=saved)
            places = acc_out + place[:, None] * VALUE_DIM + e[None, :]
            tl.store(places, acc, mask=saved[:, None] & (e < VALUE_DIM)[None, :])
        places = out + row64[:, None] * o_row + head * o_head + e[None, :]
        tl.store(places, result, mask=in_out[:, None] & (e < VALUE_DIM)[None, :])
