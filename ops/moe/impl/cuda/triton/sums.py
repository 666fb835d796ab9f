"""The sum of a row's experts."""

import triton
import triton.language as tl


@triton.jit
def sum_pairs(found, ids, out, size, CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums found [rows * CHOSEN, size] into out [rows, size], in float32; pairs without an expert are not read."""
    pieces = tl.cdiv(size, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    element = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = row * CHOSEN + place
        number = tl.where(inside, tl.load(ids + pair), -1)
        here = (number >= 0) & (number < EXPERTS)
        total += tl.load(found + pair * size + element, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * size + element, total.to(out.dtype.element_ty), mask=inside)
