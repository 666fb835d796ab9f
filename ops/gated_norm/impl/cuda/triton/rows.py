"""RMSNorm of groups of rows, with a gate."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def norm_gated_rows(
    x,
    gate,
    weight,
    out,
    count,
    epsilon,
    gate_row,
    gate_part,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    EACH: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS of `count` groups of SIZE elements per program; number i is group i % GROUPS of row i // GROUPS.

    x, out: contiguous. gate: parts of PART elements of a row, with gaps of `gate_part` from part to part. EACH: weights
    of [GROUPS, SIZE], else of [SIZE].
    """
    index = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    row, group = index // GROUPS, index % GROUPS
    element = tl.arange(0, BLOCK)[None, :]
    mask = (index < count) & (element < SIZE)
    value = tl.load(x + index * SIZE + element, mask=mask, other=0.0).to(tl.float32)
    place = group * SIZE + element
    share = tl.load(gate + row * gate_row + place // PART * gate_part + place % PART, mask=mask, other=0.0)
    share = share.to(tl.float32)
    share = share / (1.0 + tl.exp(-share))
    if GATE_FIRST:
        value = value * share
    value = value * tl.rsqrt(tl.sum(value * value, 1) / SIZE + epsilon)[:, None]
    if EACH:
        value = value * tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    else:
        value = value * tl.load(weight + 0 * index + element, mask=mask, other=0.0).to(tl.float32)
    if GATE_FIRST == 0:
        value = value * share
    tl.store(out + index * SIZE + element, value.to(out.dtype.element_ty), mask=mask)
