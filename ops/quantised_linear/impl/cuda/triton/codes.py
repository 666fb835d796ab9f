"""Decodes in registers the bytes that a kernel has loaded. Only this file knows the bits of codes."""

import triton
import triton.language as tl


@triton.jit
def halves_of(code, KIND: tl.constexpr):
    """float32 codes of bytes that hold two: of the low half and of the high one."""
    low, high = code & 15, code >> 4
    if KIND == "e2m1":
        # the bits of a float16 that is 2 ** 14 times smaller, even if it is subnormal
        low = ((low & 8).to(tl.int16) << 12) | ((low & 7).to(tl.int16) << 9)
        high = ((high & 8).to(tl.int16) << 12) | ((high & 7).to(tl.int16) << 9)
        low = low.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        high = high.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        low, high = low.to(tl.float32), high.to(tl.float32)
    return low, high


@triton.jit
def multiply_group(first, later, code, scale, zero, HAS_ZEROS: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """float32 [ROWS, OUTPUTS]: rows by the codes of one group of inputs, scaled after the sum.

    first, later: the rows' inputs in COMPUTE; for codes of 4 bits, the inputs that the low and the high halves
    multiply; otherwise `first` are all. code: bytes or codes [inputs, OUTPUTS]. scale, zero: float32 [OUTPUTS].
    """
    if KIND == "whole":
        wide = code.to(tl.float32)
        if HAS_ZEROS:
            wide = wide - zero[None, :]
        found = tl.dot(first, wide.to(COMPUTE), input_precision="ieee")
    else:
        low, high = halves_of(code, KIND)
        if HAS_ZEROS:
            low, high = low - zero[None, :], high - zero[None, :]
        found = tl.dot(first, low.to(COMPUTE), input_precision="ieee")
        found = tl.dot(later, high.to(COMPUTE), found, input_precision="ieee")
    return found * scale[None, :]
