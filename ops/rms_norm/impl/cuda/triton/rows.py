"""RMSNorm of rows, with the addition of a residual before it."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def norm_rows(
    x,
    residual,
    weight,
    out,
    total,
    count,
    epsilon,
    x_row,
    x_head,
    r_row,
    r_head,
    o_row,
    o_head,
    t_row,
    t_head,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VARIANCE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS of `count` vectors of SIZE elements per program; vector i is head i % HEADS of row i // HEADS.

    VARIANCE: leading elements that the mean square is taken of. PLUS_ONE: the weights are of 1 + weight.
    `out` may be `x`, and `total` `residual`: a vector is read before it is written, by one program.
    """
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, head = index // HEADS, index % HEADS
    element = tl.arange(0, BLOCK)
    mask = (index < count)[:, None] & (element < SIZE)[None, :]
    value = tl.load(x + (row * x_row + head * x_head)[:, None] + element[None, :], mask=mask, other=0.0)
    value = value.to(tl.float32)
    if HAS_RESIDUAL:
        place = (row * r_row + head * r_head)[:, None] + element[None, :]
        value += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        place = (row * t_row + head * t_head)[:, None] + element[None, :]
        tl.store(total + place, value.to(total.dtype.element_ty), mask=mask)
    measured = value
    if VARIANCE < SIZE:
        measured = tl.where((element < VARIANCE)[None, :], value, 0.0)
    mean = tl.sum(measured * measured, axis=1) / VARIANCE
    value = value * tl.rsqrt(mean + epsilon)[:, None]
    if HAS_WEIGHT:
        # every row loads them itself, from the first cache: to share them takes a barrier
        scale = tl.load(weight + 0 * index[:, None] + element[None, :], mask=mask, other=0.0).to(tl.float32)
        if PLUS_ONE:
            scale += 1.0
        value = value * scale
    place = (row * o_row + head * o_head)[:, None] + element[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)
