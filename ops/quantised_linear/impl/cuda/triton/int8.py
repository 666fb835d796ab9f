"""Rows rounded to 8-bit integers, and their product with an int8 weight: integer sums, scaled at the end."""

import triton
import triton.language as tl

# Adding this number and subtracting it again rounds to an integer, ties to even.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def round_rows(
    x,
    fixed,
    codes,
    scales,
    zeros,
    inputs,
    x_row,
    IS_FIXED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Rounds rows to int8 as `rounding.round_rows` defines: one program per row. INPUTS: a power of two, at least
        `inputs`.

    fixed: float32, scale and zero of all rows, if IS_FIXED. Compiled without fused products and sums.
    """
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, INPUTS)
    is_there = element < inputs
    values = tl.load(x + row * x_row + element, mask=is_there, other=0.0).to(tl.float32)
    is_spoilt = tl.max((values != values).to(tl.int32), 0) > 0
    if IS_FIXED:
        scale, zero = tl.load(fixed), tl.load(fixed + 1)
        inverse = tl.div_rn(1.0, scale)
    else:
        most, least = tl.maximum(tl.max(values, 0), 0.0), tl.minimum(tl.min(values, 0), 0.0)
        width = tl.maximum(most, -least) if SYMMETRIC else most - least
        STEPS: tl.constexpr = 127.0 if SYMMETRIC else 255.0
        inverse = tl.div_rn(STEPS, width)
        is_spoilt = is_spoilt | (width == float("inf"))
        is_sound = (inverse < float("inf")) & (width < float("inf"))
        inverse = tl.where(is_sound, inverse, 0.0)
        scale = tl.where(is_sound, tl.div_rn(width, STEPS), 0.0)
        zero = 0.0
        if not SYMMETRIC:
            zero = tl.where(is_sound, (-least * inverse + ROUNDER) - ROUNDER - 128.0, 0.0)
    found = tl.minimum(tl.maximum(values * inverse, -1024.0), 1024.0)
    found = (found + ROUNDER) - ROUNDER + zero
    found = tl.minimum(tl.maximum(found, -128.0), 127.0)
    tl.store(codes + row * inputs + element, found.to(tl.int32).to(tl.int8), mask=is_there)
    tl.store(scales + row, tl.where(is_spoilt, float("nan"), scale))
    tl.store(zeros + row, zero.to(tl.int32) if IS_FIXED or not SYMMETRIC else 0)


@triton.jit
def scaled(total, row, output, is_row, is_output, scales, zeros, weight_scales, sums, bias, HAS_BIAS: tl.constexpr):
    """float32 results of int32 sums [ROWS, OUTPUTS] of codes."""
    zero = tl.load(zeros + row, mask=is_row, other=0)
    of_codes = tl.load(sums + output, mask=is_output, other=0)
    found = (total - zero[:, None] * of_codes[None, :]).to(tl.float32)
    found = found * tl.load(scales + row, mask=is_row, other=0.0)[:, None]
    found = found * tl.load(weight_scales + output, mask=is_output, other=0.0)[None, :]
    if HAS_BIAS:
        found += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    return found


@triton.jit(do_not_specialize=["rows"])
def multiply_int8(
    x,
    weight,
    scales,
    zeros,
    weight_scales,
    sums,
    bias,
    out,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """ROWS x OUTPUTS of the product per program, or the int32 sums of one of SPLITS parts of its inputs.

    x: int8 [rows, INPUTS] with scales and zeros. weight: int8 [outputs, INPUTS] with scales, and the sums of its codes.
    GROUP: inputs that are multiplied at a time. out: [rows, outputs], or int32 [SPLITS, rows, outputs] for `add_sums`.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < rows, output < outputs
    element = tl.arange(0, GROUP)
    total = tl.zeros((ROWS, OUTPUTS), tl.int32)
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    EACH: tl.constexpr = (GROUPS + SPLITS - 1) // SPLITS
    split = tl.program_id(2)
    x_place = x + row[:, None] * INPUTS + element[None, :]
    weight_place = weight + output[None, :] * INPUTS + element[:, None]
    for group in range(split * EACH, min(split * EACH + EACH, GROUPS)):
        is_there = element < INPUTS - group * GROUP
        part = tl.load(x_place + group * GROUP, mask=is_row[:, None] & is_there[None, :], other=0)
        code = tl.load(weight_place + group * GROUP, mask=is_output[None, :] & is_there[:, None], other=0)
        total = tl.dot(part, code, total, out_dtype=tl.int32)
    place = row[:, None] * outputs + output[None, :]
    is_result = is_row[:, None] & is_output[None, :]
    if SPLITS > 1:
        tl.store(out + split.to(tl.int64) * rows * outputs + place, total, mask=is_result)
    else:
        found = scaled(total, row, output, is_row, is_output, scales, zeros, weight_scales, sums, bias, HAS_BIAS)
        tl.store(out + place, found.to(out.dtype.element_ty), mask=is_result)


@triton.jit
def add_sums(
    parts,
    scales,
    zeros,
    weight_scales,
    sums,
    bias,
    out,
    rows,
    outputs,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """parts: int32 [SPLITS, rows, outputs]. OUTPUTS of a row of the result per program."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < rows, output < outputs
    place = row[:, None] * outputs + output[None, :]
    total = tl.zeros((1, OUTPUTS), tl.int32)
    for split in range(SPLITS):
        total += tl.load(parts + split * rows * outputs + place, mask=is_output[None, :], other=0)
    found = scaled(total, row, output, is_row, is_output, scales, zeros, weight_scales, sums, bias, HAS_BIAS)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=is_output[None, :])
