"""The causal part: new tokens among themselves, tiles of rows against the keys of their own requests only."""

import triton
import triton.language as tl

from vllm_gaudi_ucm.ops.unified_attention.impl.triton.softmax import softmax_step, without_garbage


@triton.jit
def attend_causal(
    query,
    key,
    value,
    starts,
    cached,
    out,
    acc_out,
    top_out,
    total_out,
    scale,
    rows,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    o_row,
    o_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    ALONE: tl.constexpr,
    SAVES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of rows and one head per program; the longest tiles start first.

    starts: int32 [rows] first row that a row sees; beyond the row itself where it takes no part.
    cached: int32 [rows] whether a row has cached blocks too (read if SAVES): its sums go to acc_out [rows, heads,
        value_dim], top_out and total_out [rows, heads], all fp32, and not to out.
    ALONE: the step has no other part, so rows that take no part become zeros here.
    """
    head = tl.program_id(0) % HEADS
    tile = tl.num_programs(0) // HEADS - 1 - tl.program_id(0) // HEADS
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.load(starts + row, mask=row < rows, other=2147483647)
    active = start <= row
    lowest = tl.min(tl.where(active, start, 2147483647), 0)
    highest = tl.max(tl.where(active, start, 0), 0)
    stop = tl.max(tl.where(active, row, -1), 0) + 1
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    row64 = row.to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    tainted = tl.zeros([BLOCK_M], tl.int32)
    if stop > 0:
        q = tl.load(
            query + row64[:, None] * q_row + head * q_head + d[None, :],
            mask=(row < rows)[:, None] & (d < DIM)[None, :],
            other=0.0,
        ).to(COMPUTE)
        keys = key + (head // GROUP) * k_head
        values = value + (head // GROUP) * v_head
        # [lowest, all_see) is before some row's request; [all_see, diagonal) is seen by every row; the rest by some
        all_see = lowest + tl.cdiv(highest - lowest, BLOCK_N) * BLOCK_N
        diagonal = all_see + tl.maximum(tile * BLOCK_M + 1 - all_see, 0) // BLOCK_N * BLOCK_N
        for first in tl.range(all_see, diagonal, BLOCK_N, num_stages=STAGES):
            n = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
            if DIM == BLOCK_D:
                k = tl.load(keys + n[:, None] * k_row + d[None, :])
            else:
                k = tl.load(keys + n[:, None] * k_row + d[None, :], mask=(d < DIM)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
            if VALUE_DIM == BLOCK_V:
                v = tl.load(values + n[:, None] * v_row + e[None, :])
            else:
                v = tl.load(values + n[:, None] * v_row + e[None, :], mask=(e < VALUE_DIM)[None, :], other=0.0)
            acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION)
        ends = tl.minimum(all_see, stop)
        count = tl.cdiv(ends - lowest, BLOCK_N) + tl.cdiv(tl.maximum(stop - diagonal, 0), BLOCK_N)
        for index in tl.range(0, count, num_stages=1):
            before = lowest + index * BLOCK_N
            first = tl.where(before < ends, before, diagonal + before - all_see)
            n = first + tl.arange(0, BLOCK_N)
            there = n < stop
            n64 = n.to(tl.int64)
            k = tl.load(keys + n64[:, None] * k_row + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)
            v = tl.load(
                values + n64[:, None] * v_row + e[None, :], mask=there[:, None] & (e < VALUE_DIM)[None, :], other=0.0
            )
            visible = (n[None, :] >= start[:, None]) & (n[None, :] <= row[:, None])
            scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
            scores = tl.where(visible, scores, float("-inf"))
            v, tainted = without_garbage(v, visible, tainted)
            acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION)
        acc = tl.where(tainted[:, None] > 0, float("nan"), acc)
    in_out = row < rows
    if not ALONE:
        in_out = active
    if SAVES:
        has_more = tl.load(cached + row, mask=active, other=0) > 0
        in_out = in_out & (has_more == 0)
        saved = active & has_more
        place = row64 * HEADS + head
        tl.store(top_out + place, top, mask=saved)
        tl.store(total_out + place, total, mask=saved)
        tl.store(
            acc_out + place[:, None] * VALUE_DIM + e[None, :], acc, mask=saved[:, None] & (e < VALUE_DIM)[None, :]
        )
    acc = tl.where(active[:, None], acc / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)
    tl.store(
        out + row64[:, None] * o_row + head * o_head + e[None, :],
        acc.to(out.dtype.element_ty),
        mask=in_out[:, None] & (e < VALUE_DIM)[None, :],
    )
