"""Sign codes in Triton: a block's summary in one launch, and the estimates of blocks from theirs in another."""

import triton
import triton.language as tl


@triton.jit
def _gain(level):
    """The gain of a byte: steps of 2^(1/16), and none for 0."""
    return tl.where(level == 0, 0.0, tl.exp2((level.to(tl.float32) - 128.0) * 0.0625))


@triton.jit
def _byte(x):
    """uint8 of fp32 numbers, cut off at both ends; 0 for what is no number."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, 0.0), 255.0), 0.0).to(tl.int32).to(tl.uint8)


@triton.jit
def encode_blocks(
    keys, projection, blocks, summaries, k_block, k_token, k_head, s_block, s_vector, s_head,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BYTES: tl.constexpr, BLOCK_B: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks to summarise, KV heads); a pad, the dummy block 0, ends at once.

    keys: [num_blocks, TOKENS, kv heads, DIM]. projection: fp32 [8 BYTES, DIM]. blocks: int64.
    summaries: uint8 [num_blocks, TOKENS + 8, kv heads, BYTES + 1], see `_encode` of features.py. STEPS: of a gain.
    """
    block = tl.load(blocks + tl.program_id(0))
    if block != 0:
        kv_head = tl.program_id(1)
        bits: tl.constexpr = 8 * BYTES
        t, d, e = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D), tl.arange(0, 8 * BLOCK_B)
        source = keys + block * k_block + kv_head * k_head
        inside = (t < TOKENS)[:, None] & (d < DIM)[None, :]
        key = tl.load(source + t[:, None] * k_token + d[None, :], mask=inside, other=0.0).to(tl.float32)
        turn = tl.load(
            projection + e[None, :] * DIM + d[:, None], mask=(e < bits)[None, :] & (d < DIM)[:, None], other=0.0
        )
        turned = tl.dot(key, turn, input_precision="ieee")
        mean = tl.sum(turned, 0) / TOKENS
        apart = tl.where((t < TOKENS)[:, None] & (e < bits)[None, :], turned - mean[None, :], 0.0)
        target = summaries + block * s_block + kv_head * s_head
        places = (1 << tl.arange(0, 8))[None, None, :]
        signs = tl.reshape((apart >= 0).to(tl.int32), [BLOCK_T, BLOCK_B, 8])
        b = tl.arange(0, BLOCK_B)
        tl.store(
            target + t[:, None] * s_vector + b[None, :], tl.sum(signs * places, 2).to(tl.uint8),
            mask=(t < TOKENS)[:, None] & (b < BYTES)[None, :],
        )  # fmt: skip
        gain = tl.sum(apart * apart, 1) / tl.sum(tl.abs(apart), 1)
        tl.store(target + t * s_vector + BYTES, _byte(16.0 * tl.log2(gain) + 128.5), mask=t < TOKENS)
        for piece in tl.static_range(8):
            mine = (e >= piece * BYTES) & (e < (piece + 1) * BYTES)
            level = tl.floor(16.0 * tl.log2(tl.max(tl.where(mine, tl.abs(mean), 0.0), 0)) + 128.5)
            step = mean * tl.exp2((128.0 - level) * 0.0625) * STEPS
            vector = target + (TOKENS + piece) * s_vector
            tl.store(vector + e - piece * BYTES, _byte(step + 128.5), mask=mine)
            tl.store(vector + BYTES, _byte(level))


@triton.jit(do_not_specialize=["candidates", "max_rows"])
def estimate_codes(
    features, summaries, blocks, spans, first_rows, num_rows, estimates, scale, log_first, log_all, candidates,
    max_rows, q_row, q_head, s_block, s_vector, s_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr, BLOCK_B: tl.constexpr, BOXES: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, MEAN: tl.constexpr, STEPS: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Like `estimate_boxes` for sign codes: grid (candidates x KV heads). Pads are not written.

    A product for each bit of a byte, as long as a code has bytes, so that signs stay in registers as they are loaded.

    features: fp32 [rows, HEADS, 8 BYTES], queries in the directions of the codes. MEAN: the mean is behind the codes.
    """
    kv_heads: tl.constexpr = HEADS // GROUP
    lanes: tl.constexpr = BLOCK_N // GROUP
    kv_head, c = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    block = tl.load(blocks + c)
    if block != 0:
        span = tl.load(spans + c)
        first, count = tl.load(first_rows + span), tl.load(num_rows + span)
        v, b, n = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_N)
        source = summaries + block * s_block + kv_head * s_head
        inside = (v < BOXES)[:, None] & (b < BYTES)[None, :]
        codes = tl.load(source + v[:, None] * s_vector + b[None, :], mask=inside, other=0).to(tl.int32)
        gains = _gain(tl.load(source + v * s_vector + BYTES, mask=v < BOXES, other=0))
        lane, head = n // GROUP, kv_head * GROUP + n % GROUP
        for begin in range(0, max_rows, lanes):
            row = begin + lane
            real = (lane < lanes) & (row < count)
            query = features + (first + row)[None, :] * q_row + head[None, :] * q_head + b[:, None]
            asked = real[None, :] & (b < BYTES)[:, None]
            products = tl.zeros([BLOCK_V, BLOCK_N], tl.float32)
            middle = tl.zeros([BLOCK_N], tl.float32)
            for bit in tl.static_range(8):
                q = tl.load(query + b[:, None] * 7 + bit, mask=asked, other=0.0).to(COMPUTE)
                signs = (((codes >> bit) & 1) * 2 - 1).to(COMPUTE)
                products = tl.dot(signs, q, products, input_precision=PRECISION)
                if MEAN:
                    vector = source + (BOXES + bit) * s_vector
                    steps = tl.load(vector + b, mask=b < BYTES, other=128).to(tl.float32) - 128.0
                    q = tl.load(query + bit * BYTES, mask=asked, other=0.0)
                    middle += tl.sum(q * steps[:, None], 0) * (_gain(tl.load(vector + BYTES)) / STEPS)
            found = (products * gains[:, None] + middle[None, :]) * scale
            if BOXES > 1:
                found = tl.where((v == 0)[:, None], found + log_first, found)
            found = tl.where((v < BOXES)[:, None], found, float("-inf"))
            # a NaN is not among the largest, and comes back with the sum
            top = tl.max(found, 0)
            base = tl.where(tl.abs(top) < float("inf"), top, 0.0)
            result = base + tl.log(tl.sum(tl.exp(found - base[None, :]), 0)) - log_all
            result = tl.where(tl.abs(result) < float("inf"), result, float("nan"))
            result = tl.where(real, result, float("-inf"))
            target = estimates + (row * HEADS + head).to(tl.int64) * candidates + c
            tl.store(target, result, mask=(lane < lanes) & (row < max_rows))
