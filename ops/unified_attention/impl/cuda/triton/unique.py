"""Blocks that all rows of a span see: unique blocks of a single row, or selected blocks of a request."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.softmax import (
    LOG2_E,
    LOWEST,
    find_tokens,
    list_of,
    share_of,
    softmax_step,
    token_positions,
)


@triton.jit(do_not_specialize=["num_spans"])
def attend_spans(
    query,
    key_cache,
    value_cache,
    blocks,
    lo,
    hi,
    offsets,
    first_rows,
    num_rows,
    acc_out,
    top_out,
    total_out,
    slopes,
    positions,
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
    ROWS: tl.constexpr,
    SINGLE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LISTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    SLOPES: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Grid (KV heads, programs): each program takes an even share of the entries, across the boundaries of spans; of
    the UNITS of each entry, that is, so that few entries can be shared evenly, too.

    blocks: int64, lo, hi: int32 [entries], sorted by span, invisible ones last. offsets: int32 [spans + 1].
    first_rows, num_rows: [spans]; unused if SINGLE, when span i is row i. ROWS: most rows of a span.
    acc_out: fp32 [programs + spans, ROWS, HEADS, VALUE_DIM], top_out and total_out without the last axis: the partial
        result of program p for span s is at p + s.
    EARLY: the merge may start early and wait inside.
    SLOPES: scores are less by fp32 slopes [heads] times distances; int64 positions [rows].
    """
    if EARLY:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    position, end = share_of(program, tl.num_programs(1), tl.load(offsets + num_spans) * UNITS)
    m = tl.arange(0, BLOCK_M)
    lane, head = m // GROUP, kv_head * GROUP + m % GROUP
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    keys = key_cache + kv_head.to(tl.int64) * k_head
    values = value_cache + kv_head.to(tl.int64) * v_head
    span = position
    if position < end:
        span = list_of(offsets, num_spans, position // UNITS, LISTS)
    while position < end:
        stop = tl.minimum(end, tl.load(offsets + span + 1) * UNITS)
        if stop > position:
            real = lane < ROWS
            if SINGLE:
                row = span + lane
            else:
                row = tl.load(first_rows + span) + lane
                real = real & (lane < tl.load(num_rows + span))
            q = tl.load(
                query + row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + d[None, :],
                mask=real[:, None] & (d < DIM)[None, :],
                other=0.0,
            ).to(COMPUTE)
            if SLOPES:
                slope = tl.load(slopes + head) * LOG2_E
                at_row = tl.load(positions + row, mask=real, other=0).to(tl.int32)
            acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            top = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            unit: tl.constexpr = BLOCK_SIZE // UNITS
            for first in tl.range(position * unit, stop * unit, BLOCK_N, num_stages=STAGES):
                block, token, seen = find_tokens(first, stop, blocks, lo, hi, BLOCK_SIZE, BLOCK_N)
                k_place = block * k_block + token * k_token
                v_place = block * v_block + token * v_token
                k = tl.load(
                    keys + k_place[:, None] + d[None, :], mask=seen[:, None] & (d < DIM)[None, :], other=0.0
                ).to(COMPUTE)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                v = tl.load(
                    values + v_place[:, None] + e[None, :], mask=seen[:, None] & (e < VALUE_DIM)[None, :], other=0.0
                ).to(COMPUTE)
                if SLOPES:
                    far = at_row[:, None] - token_positions(first, stop, lo, BLOCK_SIZE, BLOCK_N)[None, :]
                    bias = slope[:, None] * far.to(tl.float32)
                    acc, top, total = softmax_step(acc, top, total, scores, scale, v, COMPUTE, PRECISION, CAP, bias)
                else:
                    acc, top, total = softmax_step(acc, top, total, scores, scale, v, COMPUTE, PRECISION, CAP)
            place = ((program + span).to(tl.int64) * ROWS + lane) * HEADS + head
            tl.store(top_out + place, top, mask=real)
            tl.store(total_out + place, total, mask=real)
            tl.store(
                acc_out + place[:, None] * VALUE_DIM + e[None, :], acc, mask=real[:, None] & (e < VALUE_DIM)[None, :]
            )
            position = stop
        span += 1


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
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Arguments as in `attend_spans`; span i is row i; owners: int32 [entries] the span of each.

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
        acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION, CAP)
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
