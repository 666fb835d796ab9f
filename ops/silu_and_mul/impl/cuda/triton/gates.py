"""Gated activations: of the first half of a row, times the second."""

import triton
import triton.language as tl


@triton.jit
def gate_rows(x, out, x_row, SIZE: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements of a row per program; the programs of a row follow each other.

    x: [rows, 2 * SIZE], the gates first. out: [rows, SIZE], contiguous. FORM: silu, gelu, or gelu_tanh.
    """
    pieces: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // pieces).to(tl.int64)
    element = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    mask = element < SIZE
    gate = tl.load(x + row * x_row + element, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_row + SIZE + element, mask=mask, other=0.0).to(tl.float32)
    if FORM == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    elif FORM == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # g / 2 * (1 + tanh(y)) = g * sigmoid(2 y), y = sqrt(2 / pi) * (g + 0.044715 g^3)
        gate = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    tl.store(out + row * SIZE + element, (gate * value).to(out.dtype.element_ty), mask=mask)
