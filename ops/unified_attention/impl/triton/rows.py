"""Single rows with few unique blocks: a program per row and kv head takes all of them, so that nothing is merged."""

import triton
import triton.language as tl

from vllm_gaudi_ucm.ops.unified_attention.impl.triton.entries import find_tokens
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.softmax import LOWEST, finish, softmax_step


@triton.jit(do_not_specialize=["num_spans"])
def attend_rows(
    query,
    key_cache,
    value_cache,
    blocks,
    lo,
    hi,
    offsets,
    out,
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
    o_row,
    o_head,
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
    """Grid (rows, kv heads); arguments as of `attend_spans`, span i being row i. Rows without a block become zeros."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    begin = tl.load(offsets + tl.minimum(row, num_spans))
    end = tl.load(offsets + tl.minimum(row + 1, num_spans))
    m = tl.arange(0, BLOCK_M)
    real, head = m < GROUP, kv_head * GROUP + m % GROUP
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    keys = key_cache + kv_head.to(tl.int64) * k_head
    values = value_cache + kv_head.to(tl.int64) * v_head
    q = tl.load(
        query + row.to(tl.int64) * q_row + head[:, None] * q_head + d[None, :],
        mask=real[:, None] & (d < DIM)[None, :],
        other=0.0,
    ).to(COMPUTE)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in tl.range(begin * BLOCK_SIZE, end * BLOCK_SIZE, BLOCK_N, num_stages=STAGES):
        block, token, seen = find_tokens(first, end, blocks, lo, hi, BLOCK_SIZE, BLOCK_N)
        k_place = block * k_block + token * k_token
        v_place = block * v_block + token * v_token
        k = tl.load(keys + k_place[:, None] + d[None, :], mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        v = tl.load(values + v_place[:, None] + e[None, :], mask=seen[:, None] & (e < VALUE_DIM)[None, :], other=0.0)
        acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION)
    result = finish(acc, total)
    tl.store(
        out + row.to(tl.int64) * o_row + head[:, None] * o_head + e[None, :],
        result.to(out.dtype.element_ty),
        mask=real[:, None] & (e < VALUE_DIM)[None, :],
    )
