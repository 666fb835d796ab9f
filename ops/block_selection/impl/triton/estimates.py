"""Estimated scores of candidate blocks from their summaries, for each row and head of their span."""

import triton
import triton.language as tl


@triton.jit
def _load_vector(summaries, block, index, kv_head, inside, s_block, s_vector, s_head, DIM, BLOCK_D: tl.constexpr):
    """fp32 [candidates, 1, dim]: a vector of each block's summary."""
    d = tl.arange(0, BLOCK_D)
    places = summaries + block * s_block + index * s_vector + kv_head * s_head
    mask = inside[:, None, None] & (d < DIM)[None, None, :]
    return tl.load(places[:, None, None] + d[None, None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _log_add(one, other):
    """log(exp(one) + exp(other)); NaN stays NaN."""
    high = tl.maximum(one, other)
    base = tl.where(tl.abs(high) < float("inf"), high, 0.0)
    return base + tl.log(tl.exp(one - base) + tl.exp(other - base))


@triton.jit(do_not_specialize=["candidates", "max_rows"])
def estimate_blocks(
    query,
    summaries,
    blocks,
    spans,
    first_rows,
    num_rows,
    estimates,
    scale,
    log_rest,
    log_all,
    candidates,
    max_rows,
    q_row,
    q_head,
    s_block,
    s_vector,
    s_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTORS: tl.constexpr,
    MINMAX: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (tiles of BLOCK_C candidates, kv heads). Arguments as of `block_scores`.

    estimates: fp32 [max_rows, HEADS, candidates]: -inf for a row that the span does not have, NaN for what is not
        finite. log_rest, log_all: of the keys that the first box stands for, and of all of them.
    """
    kv_head = tl.program_id(1)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < candidates
    block = tl.load(blocks + c, mask=inside, other=0)
    span = tl.load(spans + c, mask=inside, other=0)
    first, count = tl.load(first_rows + span), tl.load(num_rows + span)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    for row in range(max_rows):
        seen = inside & (row < count)
        places = query + (first + row)[:, None, None] * q_row + head[None, :, None] * q_head + d[None, None, :]
        mask = seen[:, None, None] & (g < GROUP)[None, :, None] & (d < DIM)[None, None, :]
        q = tl.load(places, mask=mask, other=0.0).to(tl.float32) * scale
        vector = _load_vector(summaries, block, 0, kv_head, seen, s_block, s_vector, s_head, DIM, BLOCK_D)
        if MINMAX:
            high = _load_vector(summaries, block, 1, kv_head, seen, s_block, s_vector, s_head, DIM, BLOCK_D)
            vector = tl.where(q < 0, FAR * vector + NEAR * high, NEAR * vector + FAR * high)
        found = tl.sum(q * vector, 2)
        if VECTORS > 1:
            found += log_rest
            for index in range(1, VECTORS):
                box = _load_vector(summaries, block, index, kv_head, seen, s_block, s_vector, s_head, DIM, BLOCK_D)
                found = _log_add(found, tl.sum(q * box, 2))
            found -= log_all
        found = tl.where(tl.abs(found) < float("inf"), found, float("nan"))
        found = tl.where(seen[:, None], found, float("-inf"))
        target = estimates + (row * HEADS + head).to(tl.int64)[None, :] * candidates + c[:, None]
        tl.store(target, found, mask=inside[:, None] & (g < GROUP)[None, :])
