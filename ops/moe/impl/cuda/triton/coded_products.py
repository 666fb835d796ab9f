"""The grouped products of `products.py` with codes of 4 or 8 bits, which are widened in registers.

A group of GROUP inputs is multiplied at a time, and its sum scaled. codes: [EXPERTS, outputs, depth], or of kinds of 4
bits [EXPERTS, outputs, depth / 2], as `pack_codes` packs groups. scales, zeros: float32 [EXPERTS, SCALE_LINES, SCALES];
SCALE_ROWS outputs and SCALE_COLUMNS inputs share one. Other parameters are as in `products.py`.
"""

import triton
import triton.language as tl

from vllm_gaudi_ucm.ops.moe.impl.cuda.triton.products import find_tile, gate
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.triton.codes import multiply_group


@triton.jit
def multiply_rows(
    part,
    later,
    codes,
    scales,
    zeros,
    row,
    inside,
    group,
    width,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """float32 [ROWS, COLUMNS]: inputs of one group by outputs `row` of one expert, whose matrix begins at `codes`.

    part, later: as in `multiply_group`. width: bytes of an output.
    """
    SPAN: tl.constexpr = GROUP if KIND == "whole" else GROUP // 2
    at = group * SPAN + tl.arange(0, SPAN)
    code = tl.load(codes + row.to(tl.int64)[None, :] * width + at[:, None], mask=inside[None, :], other=0.0)
    place = (row // SCALE_ROWS) * SCALES + group * GROUP // SCALE_COLUMNS
    scale = tl.load(scales + place, mask=inside, other=0.0)
    zero = scale
    if HAS_ZEROS:
        zero = tl.load(zeros + place, mask=inside, other=0.0)
    return multiply_group(part, later, code, scale, zero, HAS_ZEROS, KIND, COMPUTE)


@triton.jit
def multiply_gated_codes(
    x,
    codes,
    scales,
    zeros,
    bias,
    out,
    ids,
    order,
    starts,
    size,
    depth,
    chosen,
    FORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_LINES: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    KIND: tl.constexpr,
    EXPERTS: tl.constexpr,
    SPREAD: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Like `multiply_gated`."""
    pieces = tl.cdiv(size, COLUMNS)
    expert, pair, present = find_tile(ids, order, starts, tl.program_id(0) // pieces, EXPERTS, SPREAD, APART, ROWS)
    if (expert < 0) | (expert >= EXPERTS):
        return
    column = tl.program_id(0) % pieces * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    gate_row = column * 2 if INTERLEAVED else column
    up_row = gate_row + 1 if INTERLEAVED else column + size
    SPAN: tl.constexpr = GROUP if KIND == "whole" else GROUP // 2
    width = depth if KIND == "whole" else depth // 2
    matrix = codes + expert.to(tl.int64) * 2 * size * width
    its_scales = scales + expert.to(tl.int64) * SCALE_LINES * SCALES
    its_zeros = zeros + expert.to(tl.int64) * SCALE_LINES * SCALES
    given = x + (pair // chosen)[:, None] * depth + tl.arange(0, SPAN)[None, :]
    gates = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for group in range(depth // GROUP):
        part = tl.load(given + group * GROUP, mask=present[:, None], other=0.0).to(COMPUTE)
        later = part
        if KIND != "whole":
            later = tl.load(given + group * GROUP + SPAN, mask=present[:, None], other=0.0).to(COMPUTE)
        gates += multiply_rows(
            *(part, later, matrix, its_scales, its_zeros, gate_row, inside, group, width),
            *(GROUP, SCALE_ROWS, SCALE_COLUMNS, SCALES, HAS_ZEROS, KIND, COMPUTE),
        )
        up += multiply_rows(
            *(part, later, matrix, its_scales, its_zeros, up_row, inside, group, width),
            *(GROUP, SCALE_ROWS, SCALE_COLUMNS, SCALES, HAS_ZEROS, KIND, COMPUTE),
        )
    if bias is not None:
        added = bias + expert.to(tl.int64) * 2 * size
        gates += tl.load(added + gate_row, mask=inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(added + up_row, mask=inside, other=0.0).to(tl.float32)[None, :]
    found = gate(gates, up, FORM, ALPHA, BETA, LIMIT).to(out.dtype.element_ty)
    tl.store(out + pair[:, None] * size + column[None, :], found, mask=present[:, None] & inside[None, :])


@triton.jit
def multiply_shared_codes(
    x,
    codes,
    scales,
    zeros,
    bias,
    out,
    shares,
    ids,
    order,
    starts,
    size,
    depth,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_LINES: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    KIND: tl.constexpr,
    EXPERTS: tl.constexpr,
    SPREAD: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Like `multiply_shared`."""
    pieces = tl.cdiv(size, COLUMNS)
    expert, pair, present = find_tile(ids, order, starts, tl.program_id(0) // pieces, EXPERTS, SPREAD, APART, ROWS)
    if (expert < 0) | (expert >= EXPERTS):
        return
    column = tl.program_id(0) % pieces * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    SPAN: tl.constexpr = GROUP if KIND == "whole" else GROUP // 2
    width = depth if KIND == "whole" else depth // 2
    matrix = codes + expert.to(tl.int64) * size * width
    its_scales = scales + expert.to(tl.int64) * SCALE_LINES * SCALES
    its_zeros = zeros + expert.to(tl.int64) * SCALE_LINES * SCALES
    given = x + pair[:, None] * depth + tl.arange(0, SPAN)[None, :]
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for group in range(depth // GROUP):
        part = tl.load(given + group * GROUP, mask=present[:, None], other=0.0).to(COMPUTE)
        later = part
        if KIND != "whole":
            later = tl.load(given + group * GROUP + SPAN, mask=present[:, None], other=0.0).to(COMPUTE)
        found += multiply_rows(
            *(part, later, matrix, its_scales, its_zeros, column, inside, group, width),
            *(GROUP, SCALE_ROWS, SCALE_COLUMNS, SCALES, HAS_ZEROS, KIND, COMPUTE),
        )
    if bias is not None:
        found += tl.load(bias + expert.to(tl.int64) * size + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    share = tl.load(shares + pair, mask=present, other=0.0).to(tl.float32)
    found = (found * share[:, None]).to(out.dtype.element_ty)
    tl.store(out + pair[:, None] * size + column[None, :], found, mask=present[:, None] & inside[None, :])
