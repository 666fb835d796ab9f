"""Multiplies rows by a quantised weight: codes are read in place, widened in registers, and scaled after each group's
sum.
"""

import triton
import triton.language as tl

from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.triton.codes import halves_of, multiply_group


@triton.jit(do_not_specialize=["rows"])
def multiply_codes(
    x,
    codes,
    scales,
    zeros,
    bias,
    out,
    rows,
    outputs,
    x_row,
    out_row,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """ROWS x OUTPUTS of the product per program, or of one of SPLITS parts of its inputs, without bias.

    codes: [outputs, INPUTS], or PACKED: bytes [outputs, INPUTS / 2], of which byte j of a group has codes j (low) and
    j + GROUP / 2. GROUP: inputs that are multiplied at a time, all of one scale. scales, zeros: float32 rows of SCALES;
    SCALE_ROWS outputs and SCALE_COLUMNS inputs share one. COMPUTE: dtype of products, which codes are exact in.
    out: [rows, outputs], or float32 [SPLITS, rows, outputs], which `add_parts` adds up.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = (row < rows)[:, None], output < outputs
    SPAN: tl.constexpr = GROUP // 2 if PACKED else GROUP
    element = tl.arange(0, SPAN)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    x_place = x + row[:, None] * x_row + element[None, :]
    if PACKED:
        code_place = codes + output[None, :] * (INPUTS // 2) + element[:, None]
    else:
        code_place = codes + output[None, :] * INPUTS + element[:, None]
    scale_place = (output // SCALE_ROWS) * SCALES
    GROUPS: tl.constexpr = INPUTS // GROUP
    EACH: tl.constexpr = (GROUPS + SPLITS - 1) // SPLITS
    split = tl.program_id(2)
    for group in range(split * EACH, min(split * EACH + EACH, GROUPS)):
        scale = tl.load(scales + scale_place + group * GROUP // SCALE_COLUMNS, mask=is_output, other=0.0)
        code = tl.load(code_place + group * SPAN, mask=is_output[None, :], other=0.0)
        part = tl.load(x_place + group * GROUP, mask=is_row, other=0.0).to(COMPUTE)
        zero = scale
        if HAS_ZEROS:
            zero = tl.load(zeros + scale_place + group * GROUP // SCALE_COLUMNS, mask=is_output, other=0.0)
        later = part
        if PACKED:
            later = tl.load(x_place + group * GROUP + SPAN, mask=is_row, other=0.0).to(COMPUTE)
        total += multiply_group(part, later, code, scale, zero, HAS_ZEROS, "uint4" if PACKED else "whole", COMPUTE)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    place = out + split.to(tl.int64) * rows * out_row + row[:, None] * out_row + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row & is_output[None, :])


@triton.jit
def add_parts(parts, bias, out, count, outputs, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, ELEMENTS: tl.constexpr):
    """parts: float32 [SPLITS, count], of products of `outputs` each; out: [count], their sums and the bias."""
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_there = element < count
    total = tl.zeros((ELEMENTS,), tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts + split * count + element, mask=is_there, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + element % outputs, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def narrow_rows(x, narrow, scales, inputs, x_row, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, INPUTS: tl.constexpr):
    """Rounds rows to e4m3, each with a scale of its own: one program per row. INPUTS: a power of two, at least
    `inputs`.
    """
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, INPUTS)
    is_there = element < inputs
    values = tl.load(x + row * x_row + element, mask=is_there, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0) / LARGEST, SMALLEST)
    # a quotient may be above the largest by its rounding
    found = tl.clamp(values / scale, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(narrow + row * inputs + element, found.to(narrow.dtype.element_ty), mask=is_there)
    tl.store(scales + row, scale)


@triton.jit
def write_out(
    codes,
    scales,
    zeros,
    out,
    outputs,
    inputs,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """A group of inputs of OUTPUTS outputs as plain elements [outputs, inputs], rounded once; codes as above."""
    group = tl.program_id(1)
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    SPAN: tl.constexpr = GROUP // 2 if PACKED else GROUP
    element = tl.arange(0, SPAN)
    width = inputs // 2 if PACKED else inputs
    code = tl.load(
        codes + output[:, None] * width + group * SPAN + element[None, :], mask=is_output[:, None], other=0.0
    )
    place = (output // SCALE_ROWS) * SCALES + group * GROUP // SCALE_COLUMNS
    scale = tl.load(scales + place, mask=is_output, other=0.0)[:, None]
    zero = (
        tl.load(zeros + place, mask=is_output, other=0.0)[:, None] if HAS_ZEROS else tl.zeros((OUTPUTS, 1), tl.float32)
    )
    to = out + output[:, None] * inputs + group * GROUP + element[None, :]
    if PACKED:
        low, high = halves_of(code, "uint4")
        tl.store(to, ((low - zero) * scale).to(out.dtype.element_ty), mask=is_output[:, None])
        tl.store(to + SPAN, ((high - zero) * scale).to(out.dtype.element_ty), mask=is_output[:, None])
    else:
        tl.store(to, ((code.to(tl.float32) - zero) * scale).to(out.dtype.element_ty), mask=is_output[:, None])
