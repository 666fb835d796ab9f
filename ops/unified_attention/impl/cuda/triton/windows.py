"""Requests with several rows under a window, in one launch: cached blocks, new tokens, sink, and the division."""

import triton
import triton.language as tl

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.softmax import (
    LOWEST,
    add_sink,
    find_tokens,
    finish,
    softmax_step,
    without_garbage,
)


@triton.jit(do_not_specialize=["num_columns", "num_singles", "lo_span", "hi_span"])
def attend_windows(
    query,
    key,
    value,
    key_cache,
    value_cache,
    order,
    row_spans,
    lo,
    hi,
    rise,
    columns,
    column_blocks,
    whole_counts,
    offsets,
    starts,
    single_blocks,
    single_lo,
    single_hi,
    single_offsets,
    out,
    sinks,
    scale,
    num_columns,
    num_singles,
    lo_span,
    lo_column,
    hi_span,
    hi_column,
    q_row,
    q_head,
    n_row,
    n_head,
    w_row,
    w_head,
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
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NEW: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
    SINGLES: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid (KV heads, tiles); a tile has rows of one span. Every row of a tile is written; a row that sees no token is
    zeros.

    order, columns, column_blocks, whole_counts, offsets: see SharedTiles; row_spans, lo, hi, rise: as in SharedPart.
    starts: int32 [rows], see CudaPlan; NEW: new tokens per step. n_row .. w_head: strides of key and value.
    SINGLES: single_blocks .. single_offsets are the lists of the unique part; list i belongs to row i, if it is less
        than num_singles.
    sinks: fp32 [heads], read if SINKS.
    """
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    first_row = tl.load(order + tile * ROWS)
    if first_row >= 0:
        m = tl.arange(0, BLOCK_M)
        lane, head = m // GROUP, kv_head * GROUP + m % GROUP
        d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        keys = key_cache + kv_head.to(tl.int64) * k_head
        values = value_cache + kv_head.to(tl.int64) * v_head
        row = tl.load(order + tile * ROWS + lane, mask=lane < ROWS, other=-1)
        real = row >= 0
        row64 = row.to(tl.int64)
        q = tl.load(
            query + row64[:, None] * q_row + head[:, None] * q_head + d[None, :],
            mask=real[:, None] & (d < DIM)[None, :],
            other=0.0,
        ).to(COMPUTE)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        top = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        tainted = tl.zeros([BLOCK_M], tl.int32)
        span = tl.load(row_spans + first_row).to(tl.int64)
        raised = tl.load(rise + row, mask=real, other=0).to(tl.int32)
        lists = tile.to(tl.int64) * num_columns
        # blocks that all rows see completely
        whole_end = tl.load(whole_counts + tile) * BLOCK_SIZE
        for first in tl.range(0, whole_end, BLOCK_N, num_stages=STAGES):
            n = first + tl.arange(0, BLOCK_N)
            inside = n < whole_end
            token = n % BLOCK_SIZE
            block = tl.load(column_blocks + lists + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            k_place = block * k_block + token * k_token
            v_place = block * v_block + token * v_token
            k = tl.load(keys + k_place[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
            v = tl.load(
                values + v_place[:, None] + e[None, :], mask=inside[:, None] & (e < VALUE_DIM)[None, :], other=0.0
            )
            scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
            scores = tl.where(inside[None, :], scores, float("-inf"))
            acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION, CAP)
        # blocks at the ends of the window; nothing is loaded that no row of the tile sees
        list_end = (tl.load(offsets + tile + 1) - tl.load(offsets + tile)) * BLOCK_SIZE
        for first in tl.range(whole_end, list_end, BLOCK_N, num_stages=1):
            n = first + tl.arange(0, BLOCK_N)
            inside = n < list_end
            token = n % BLOCK_SIZE
            column = tl.load(columns + lists + n // BLOCK_SIZE, mask=inside, other=0)
            block = tl.load(column_blocks + lists + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            lowest = tl.load(lo + span * lo_span + column * lo_column, mask=inside, other=0).to(tl.int32)
            highest = tl.load(hi + span * hi_span + column * hi_column, mask=inside, other=0)
            some = inside & (token >= lowest) & (token < highest)
            visible = some[None, :] & (token[None, :] >= lowest[None, :] + raised[:, None]) & real[:, None]
            k_place = block * k_block + token * k_token
            v_place = block * v_block + token * v_token
            k = tl.load(keys + k_place[:, None] + d[None, :], mask=some[:, None] & (d < DIM)[None, :], other=0.0)
            v = tl.load(
                values + v_place[:, None] + e[None, :], mask=some[:, None] & (e < VALUE_DIM)[None, :], other=0.0
            )
            scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
            scores = tl.where(visible, scores, float("-inf"))
            v, tainted = without_garbage(v, visible, tainted)
            acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION, CAP)
        if SINGLES:
            # a single row, which has its tile to itself
            begin = tl.load(single_offsets + tl.minimum(first_row, num_singles))
            end = tl.load(single_offsets + tl.minimum(first_row + 1, num_singles))
            for first in tl.range(begin * BLOCK_SIZE, end * BLOCK_SIZE, BLOCK_N, num_stages=STAGES):
                block, token, seen = find_tokens(
                    first, end, single_blocks, single_lo, single_hi, BLOCK_SIZE, BLOCK_N
                )  # fmt: skip
                k_place = block * k_block + token * k_token
                v_place = block * v_block + token * v_token
                k = tl.load(keys + k_place[:, None] + d[None, :], mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
                v = tl.load(
                    values + v_place[:, None] + e[None, :], mask=seen[:, None] & (e < VALUE_DIM)[None, :], other=0.0
                )
                scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION, CAP)
        # new tokens among themselves
        start = tl.load(starts + row, mask=real, other=2147483647)
        active = real & (start <= row)
        stop = tl.max(tl.where(active, row, -1), 0) + 1
        for first in tl.range(tl.min(tl.where(active, start, stop), 0), stop, NEW, num_stages=1):
            n = first + tl.arange(0, NEW)
            inside = n < stop
            n64 = n.to(tl.int64)
            visible = active[:, None] & (n[None, :] >= start[:, None]) & (n[None, :] <= row[:, None])
            k = tl.load(
                key + n64[:, None] * n_row + kv_head * n_head + d[None, :],
                mask=inside[:, None] & (d < DIM)[None, :],
                other=0.0,
            )
            v = tl.load(
                value + n64[:, None] * w_row + kv_head * w_head + e[None, :],
                mask=inside[:, None] & (e < VALUE_DIM)[None, :],
                other=0.0,
            )
            scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
            scores = tl.where(visible, scores, float("-inf"))
            v, tainted = without_garbage(v, visible, tainted)
            acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION, CAP)
        if SINKS:
            acc, total = add_sink(acc, top, total, tl.load(sinks + head, mask=real, other=0.0))
        result = finish(tl.where(tainted[:, None] > 0, float("nan"), acc), total)
        tl.store(
            out + row64[:, None] * o_row + head[:, None] * o_head + e[None, :],
            result.to(out.dtype.element_ty),
            mask=real[:, None] & (e < VALUE_DIM)[None, :],
        )
