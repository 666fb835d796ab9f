"""Exponential noise from a hash of a row's key and of a token."""

import triton
import triton.language as tl


@triton.jit
def draw_rows(keys, mixes, noise, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK tokens of a row per program; the programs of a row follow each other.

    keys: int32 [rows]. mixes: int32 [VOCAB]. noise: float32 [rows, VOCAB], contiguous.
    """
    pieces: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // pieces).to(tl.int64)
    token = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    mask = token < VOCAB
    hashed = tl.load(keys + row).to(tl.uint32, bitcast=True) ^ tl.load(mixes + token, mask=mask, other=0).to(
        tl.uint32, bitcast=True
    )
    hashed = ((hashed << 13) | (hashed >> 19)) * 5 + 0xE6546B64
    hashed = hashed ^ 16
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35
    hashed = hashed ^ (hashed >> 16)
    high, low = (hashed >> 16).to(tl.float32), (hashed & 0xFFFF).to(tl.float32)
    uniform = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    # 1 - u is exact if u is large, and loses u if it is small: there, -log(1 - u) as a series
    series = 1.0 / 7.0 + uniform * 0.125
    series = 1.0 / 6.0 + uniform * series
    series = 0.2 + uniform * series
    series = 0.25 + uniform * series
    series = 1.0 / 3.0 + uniform * series
    series = 0.5 + uniform * series
    series = uniform * (1.0 + uniform * series)
    found = tl.where(uniform < 0.0625, series, -tl.log(1.0 - uniform))
    tl.store(noise + row * VOCAB + token, found, mask=mask)
