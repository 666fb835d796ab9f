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


@triton.jit
def divide_queries(
    query, projection, features, terms, numbers, q_row, q_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BYTES: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, TERMS: tl.constexpr, FINER: tl.constexpr,
):  # fmt: skip
    """Grid (rows, KV heads): queries in the directions of the codes, as floats and as sums of integers. BLOCK_D:
    elements of a head that are multiplied at once.

    projection: fp32 [8 BYTES, DIM]. features: fp32 [rows, HEADS, 8 BYTES].
    terms: int8 [rows, HEADS, TERMS, 8, BLOCK_B], the first bits of all bytes, then the second ones, and so on; each
    term counts FINER times less than the one before it.
    numbers: fp32 [rows, HEADS, 1 + TERMS], what 1 of the first term is, and the sum of each term.
    """
    row, kv_head = tl.program_id(0), tl.program_id(1)
    n, d, e = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, 8 * BLOCK_B)
    asked, inside = n < GROUP, e < 8 * BYTES
    source = query + row * q_row + (kv_head * GROUP + n)[:, None] * q_head + d[None, :]
    turned = tl.zeros([BLOCK_N, 8 * BLOCK_B], tl.float32)
    for begin in tl.static_range(0, DIM, BLOCK_D):
        left = d < DIM - begin
        own = tl.load(source + begin, mask=asked[:, None] & left[None, :], other=0.0).to(tl.float32)
        directions = projection + e[None, :] * DIM + begin + d[:, None]
        turn = tl.load(directions, mask=inside[None, :] & left[:, None], other=0.0)
        turned = tl.dot(own, turn, turned, input_precision="tf32x3")
    at = (row * HEADS + kv_head * GROUP + n).to(tl.int64)
    tl.store(features + at[:, None] * (8 * BYTES) + e[None, :], turned, mask=asked[:, None] & inside[None, :])
    peak = tl.max(tl.abs(turned), 1)
    unit = tl.where(peak > 0, peak / 127, 1.0)
    rest = turned / unit[:, None]
    # what is no number makes the unit one, too
    tl.store(numbers + at * (1 + TERMS), unit + tl.sum(turned * 0.0, 1), mask=asked)
    for term in tl.static_range(TERMS):
        whole = tl.floor(rest + 0.5)
        target = terms + (at[:, None] * TERMS + term) * (8 * BLOCK_B) + (e % 8 * BLOCK_B + e // 8)[None, :]
        tl.store(target, whole.to(tl.int8), mask=asked[:, None])
        tl.store(numbers + at * (1 + TERMS) + 1 + term, tl.sum(whole, 1), mask=asked)
        rest = (rest - whole) * FINER


@triton.jit
def _lowest_bits(codes, PACKED: tl.constexpr):
    """The lowest bit of each byte, int8. PACKED: of four bytes by one instruction."""
    if PACKED:
        return tl.inline_asm_elementwise("and.b32 $0, $1, 0x01010101;", "=r,r", [codes], tl.int8, is_pure=True, pack=4)
    return (codes & 1).to(tl.int8)


@triton.jit
def _next_bits(codes, PACKED: tl.constexpr):
    """Bytes whose lowest bit was the one above it. PACKED: four by one instruction, whose highest bits are wrong."""
    if PACKED:
        return tl.inline_asm_elementwise("shr.b32 $0, $1, 1;", "=r,r", [codes], tl.uint8, is_pure=True, pack=4)
    return codes >> 1


@triton.jit(do_not_specialize=["candidates", "max_rows"])
def estimate_codes(
    features, terms, numbers, summaries, blocks, spans, first_rows, num_rows, estimates, scale, log_first, log_all,
    candidates, max_rows, s_block, s_vector, s_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr, BLOCK_B: tl.constexpr, BOXES: tl.constexpr,
    BLOCK_V: tl.constexpr, SLOTS: tl.constexpr, MEAN: tl.constexpr, STEPS: tl.constexpr, TERMS: tl.constexpr,
    FINER: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Like `estimate_boxes` for sign codes: grid (candidates x KV heads). Pads are not written.

    Integers are multiplied, which needs no conversion of bits: a product for each bit of a byte and each term, of two
    codes at once. One half of its rows multiplies the first code of a pair and the other half the second.

    features, terms, numbers: of `divide_queries`. MEAN: the mean is behind the codes. SLOTS: queries of a product.
    """
    kv_heads: tl.constexpr = HEADS // GROUP
    lanes: tl.constexpr = SLOTS // GROUP
    kv_head, c = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    block = tl.load(blocks + c)
    if block != 0:
        span = tl.load(spans + c)
        first, count = tl.load(first_rows + span), tl.load(num_rows + span)
        source = summaries + block * s_block + kv_head * s_head
        k, pair, m = tl.arange(0, 2 * BLOCK_B), tl.arange(0, BLOCK_V // 2), tl.arange(0, 2 * SLOTS)
        slot = tl.arange(0, SLOTS)
        if MEAN:
            e = tl.arange(0, 8 * BLOCK_B)
            piece = source + (BOXES + e // BYTES) * s_vector
            steps = tl.load(piece + e % BYTES, mask=e < 8 * BYTES, other=128).to(tl.float32) - 128.0
            mean = steps * _gain(tl.load(piece + BYTES, mask=e < 8 * BYTES, other=0)) / STEPS
        for begin in range(0, max_rows, lanes):
            at = (first + begin + m % SLOTS // GROUP) * HEADS + kv_head * GROUP + m % SLOTS % GROUP
            real = (m % SLOTS < lanes * GROUP) & (begin + m % SLOTS // GROUP < count)
            asked = real[:, None] & ((m // SLOTS)[:, None] == (k // BLOCK_B)[None, :])
            place = terms + at[:, None] * (TERMS * 8 * BLOCK_B) + (k % BLOCK_B)[None, :]
            unit = tl.load(numbers + at * (1 + TERMS), mask=real, other=0.0) * scale
            top = tl.full([SLOTS], float("-inf"), tl.float32)
            sums = tl.zeros([SLOTS], tl.float32)
            for start in range(0, BOXES, BLOCK_V):
                vector = start + 2 * pair[None, :] + (k // BLOCK_B)[:, None]
                # here and not before the loops: so they go to where products read them once, not once for each bit
                codes = tl.load(
                    source + vector * s_vector + (k % BLOCK_B)[:, None],
                    mask=(vector < BOXES) & (k % BLOCK_B < BYTES)[:, None], other=0,
                )  # fmt: skip
                products = tl.zeros([2 * SLOTS, BLOCK_V // 2], tl.float32)
                weight = unit
                for term in tl.static_range(TERMS):
                    ones = tl.zeros([2 * SLOTS, BLOCK_V // 2], tl.int32)
                    bits = codes
                    for bit in tl.static_range(8):
                        q = tl.load(place + (8 * term + bit) * BLOCK_B, mask=asked, other=0)
                        ones = tl.dot(q, _lowest_bits(bits, PACKED), ones, out_dtype=tl.int32)
                        bits = _next_bits(bits, PACKED)
                    every = tl.load(numbers + at * (1 + TERMS) + 1 + term, mask=real, other=0.0)
                    products += (2 * ones.to(tl.float32) - every[:, None]) * weight[:, None]
                    weight = weight / FINER
                one = source + (start + 2 * pair) * s_vector + BYTES
                gains = tl.where(
                    (m < SLOTS)[:, None],
                    _gain(tl.load(one, mask=start + 2 * pair < BOXES, other=0))[None, :],
                    _gain(tl.load(one + s_vector, mask=start + 2 * pair + 1 < BOXES, other=0))[None, :],
                )
                found, place_of = products * gains, start + 2 * pair[None, :] + (m // SLOTS)[:, None]
                if BOXES > 1:
                    found = tl.where(place_of == 0, found + log_first, found)
                found = tl.where(place_of < BOXES, found, float("-inf"))
                # a NaN is not among the largest, and comes back with the sum
                larger = tl.maximum(top, tl.max(tl.reshape(tl.max(found, 1), [2, SLOTS]), 0))
                base = tl.where(tl.abs(larger) < float("inf"), larger, 0.0)
                both = tl.reshape(tl.broadcast_to(base[None, :], [2, SLOTS]), [2 * SLOTS])
                fresh = tl.sum(tl.reshape(tl.sum(tl.exp(found - both[:, None]), 1), [2, SLOTS]), 0)
                sums = sums * tl.exp(top - base) + fresh
                top = larger
            base = tl.where(tl.abs(top) < float("inf"), top, 0.0)
            result = base + tl.log(sums) - log_all
            row, head = begin + slot // GROUP, kv_head * GROUP + slot % GROUP
            mine = (slot < lanes * GROUP) & (row < count)
            if MEAN:
                own = features + ((first + row) * HEADS + head)[:, None] * (8 * BYTES) + e[None, :]
                q = tl.load(own, mask=mine[:, None] & (e < 8 * BYTES)[None, :], other=0.0)
                # the same for each code, so that it may be added to the sum
                result += tl.sum(q * mean[None, :], 1) * scale
            result = tl.where(tl.abs(result) < float("inf"), result, float("nan"))
            result = tl.where(mine, result, float("-inf"))
            target = estimates + (row * HEADS + head).to(tl.int64) * candidates + c
            tl.store(target, result, mask=(slot < lanes * GROUP) & (row < max_rows))
