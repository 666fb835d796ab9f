"""Summaries of full blocks in Triton, in one launch."""

import triton
import triton.language as tl


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
            tl.store(target, tl.where(broken, float("nan"), least).to(dtype), mask=d < DIM)
            tl.store(target + s_vector, tl.where(broken, float("nan"), most).to(dtype), mask=d < DIM)
        elif VECTORS == 1:
            tl.store(target, (tl.sum(key, 0) / TOKENS).to(dtype), mask=d < DIM)
        else:
            apart = tl.where(inside, key - (tl.sum(key, 0) / TOKENS)[None, :], 0.0)
            far = tl.sum(apart * apart, 1)
            # what is no number is farthest, so that each key has a rank of its own
            far = tl.where(t < TOKENS, tl.where(far == far, far, float("inf")), -1.0)
            # one after the other: distances that are compared across two layouts may be summed in two orders
            rank = tl.full([BLOCK_T], VECTORS, tl.int32)
            for box in range(VECTORS - 1):
                farthest = t == tl.argmax(far, 0)
                rank = tl.where(farthest, box, rank)
                far = tl.where(farthest, -2.0, far)
            single = rank < VECTORS - 1
            boxes = target[None, :] + (1 + rank)[:, None] * s_vector
            tl.store(boxes, key.to(dtype), mask=inside & single[:, None])
            rest = tl.sum(tl.where(single[:, None], 0.0, key), 0) / (TOKENS - VECTORS + 1)
            tl.store(target, rest.to(dtype), mask=d < DIM)
