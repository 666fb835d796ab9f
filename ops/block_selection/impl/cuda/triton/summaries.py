"""Summaries of full blocks in Triton, in one launch."""

import triton
import triton.language as tl


@triton.jit
def _e4m3(x):
    """Returns int32, the codes of fp32 numbers as 8-bit floats, rounded to the nearest and clamped to 448.

    Spelled out, because Triton's interpreter (3.9) truncates where a GPU rounds, and turns NaN into a number.
    """
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # 20 of 23 bits of the fraction go, 120 is the difference of the biases of exponents
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 numbers are multiples of 2^-9, which is the precision of fp32 next to 2^14
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(x == x, tl.where(size < 0.015625, small, normal), 0x7F)
    return code + tl.where(x < 0, 0x80, 0)


@triton.jit
def _stored(x, dtype: tl.constexpr):
    """Converts fp32 to the stored form. dtype: the dtype of summaries; 8-bit floats are stored as bytes."""
    if dtype == tl.uint8:
        return _e4m3(x).to(tl.uint8)
    else:
        return x.to(dtype)


@triton.jit
def summarise_blocks(
    keys,
    blocks,
    summaries,
    k_block,
    k_token,
    k_head,
    s_block,
    s_vector,
    s_head,
    TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTORS: tl.constexpr,
    MINMAX: tl.constexpr,
):
    """Grid (blocks to summarise, KV heads); a pad, the dummy block 0, ends at once.

    keys: [num_blocks, TOKENS, kv heads, DIM]; blocks: int64; summaries: [num_blocks, vectors, kv heads, DIM]: smallest
        and largest elements, or boxes: the mean of the rest, then the VECTORS - 1 keys farthest from the mean of all.
        8-bit floats are passed as uint8.
    """
    block = tl.load(blocks + tl.program_id(0))
    if block != 0:
        kv_head = tl.program_id(1)
        t, d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
        inside = (t < TOKENS)[:, None] & (d < DIM)[None, :]
        source = keys + block * k_block + kv_head * k_head
        key = tl.load(source + t[:, None] * k_token + d[None, :], mask=inside, other=0.0).to(tl.float32)
        target = summaries + block * s_block + kv_head * s_head + d
        dtype = summaries.dtype.element_ty
        if MINMAX:
            broken = tl.max(tl.where(key == key, 0, 1), 0) > 0
            least = tl.min(tl.where(inside, key, float("inf")), 0)
            most = tl.max(tl.where(inside, key, float("-inf")), 0)
            tl.store(target, _stored(tl.where(broken, float("nan"), least), dtype), mask=d < DIM)
            tl.store(target + s_vector, _stored(tl.where(broken, float("nan"), most), dtype), mask=d < DIM)
        elif VECTORS == 1:
            tl.store(target, _stored(tl.sum(key, 0) / TOKENS, dtype), mask=d < DIM)
        else:
            apart = tl.where(inside, key - (tl.sum(key, 0) / TOKENS)[None, :], 0.0)
            far = tl.sum(apart * apart, 1)
            # a NaN is farthest, so that each key has a rank of its own
            far = tl.where(t < TOKENS, tl.where(far == far, far, float("inf")), -1.0)
            # one after the other: distances that are compared across two layouts may be summed in two orders
            rank = tl.full([BLOCK_T], VECTORS, tl.int32)
            for box in range(VECTORS - 1):
                farthest = t == tl.argmax(far, 0)
                rank = tl.where(farthest, box, rank)
                far = tl.where(farthest, -2.0, far)
            single = rank < VECTORS - 1
            boxes = target[None, :] + (1 + rank)[:, None] * s_vector
            tl.store(boxes, _stored(key, dtype), mask=inside & single[:, None])
            rest = tl.sum(tl.where(single[:, None], 0.0, key), 0) / (TOKENS - VECTORS + 1)
            tl.store(target, _stored(rest, dtype), mask=d < DIM)
