"""Single rows with their unique blocks in one loop over all entries of a program; a step of it is of one block.

Loads of the next row's keys are under way while a row is finished, which many rows with few blocks feel.
"""

import triton
import triton.language as tl

from vllm_gaudi_ucm.ops.unified_attention.impl.triton.softmax import LOWEST, share_of, softmax_step


@triton.jit(do_not_specialize=["num_spans"])
def attend_spans_flat(
    query,
    key_cache,
    value_cache,
    blocks,
    lo,
    hi,
    offsets,
    owners,
    acc_out,
    top_out,
    total_out,
    scale,
    num_spans,
    q_row,
    q_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Arguments as of `attend_spans`, span i being row i; owners: int32 [entries] the span of each.

    BLOCK_N divides BLOCK_SIZE.
    """
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    entries = tl.load(offsets + num_spans)
    position, end = share_of(program, tl.num_programs(1), entries)
    m = tl.arange(0, BLOCK_M)
    real, head = m < GROUP, kv_head * GROUP + m % GROUP
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    keys = key_cache + kv_head.to(tl.int64) * k_head
    values = value_cache + kv_head.to(tl.int64) * v_head
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in tl.range(position * BLOCK_SIZE, end * BLOCK_SIZE, BLOCK_N, num_stages=STAGES):
        entry = first // BLOCK_SIZE
        token = first % BLOCK_SIZE + tl.arange(0, BLOCK_N)
        owner = tl.load(owners + entry)
        q = tl.load(
            query + owner.to(tl.int64) * q_row + head[:, None] * q_head + d[None, :],
            mask=real[:, None] & (d < DIM)[None, :],
            other=0.0,
        ).to(COMPUTE)
        seen = (token >= tl.load(lo + entry)) & (token < tl.load(hi + entry))
        block = tl.load(blocks + entry)
        k_place = block * k_block + token * k_token
        v_place = block * v_block + token * v_token
        k = tl.load(keys + k_place[:, None] + d[None, :], mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        v = tl.load(values + v_place[:, None] + e[None, :], mask=seen[:, None] & (e < VALUE_DIM)[None, :], other=0.0)
        acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION)
        after = (first + BLOCK_N) // BLOCK_SIZE
        if (after >= end) | (tl.load(owners + after, mask=after < end, other=-1) != owner):
            place = (program + owner).to(tl.int64) * HEADS + head
            tl.store(top_out + place, top, mask=real)
            tl.store(total_out + place, total, mask=real)
            tl.store(
                acc_out + place[:, None] * VALUE_DIM + e[None, :], acc, mask=real[:, None] & (e < VALUE_DIM)[None, :]
            )
            acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            top = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
