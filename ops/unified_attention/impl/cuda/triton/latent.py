"""Attention whose values are the first elements of the keys: a tile of keys is read once, and multiplied twice.

A key consists of its value and the rest, read as two tiles: both sizes are powers of two or near one (512 and 64),
while the size of a whole key is not. The kernels are otherwise like `attend_spans`, `attend_shared` and
`attend_causal`, without some of their optimisations. Tokens that only some rows of a tile see are checked one by one;
see `without_garbage`.
"""

import triton
import triton.language as tl

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.softmax import (
    LOWEST,
    find_tokens,
    list_of,
    share_of,
    softmax_step,
    without_garbage,
)


@triton.jit
def load_both(
    places,
    seen,
    VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Loads keys at the pointers `places` [n]: the value [n, BLOCK_V] and the rest [n, BLOCK_R], 0 where not seen."""
    e, r = tl.arange(0, BLOCK_V), VALUE_DIM + tl.arange(0, BLOCK_R)
    value = tl.load(places[:, None] + e[None, :], mask=seen[:, None] & (e < VALUE_DIM)[None, :], other=0.0)
    rest = tl.load(places[:, None] + r[None, :], mask=seen[:, None] & (r < DIM)[None, :], other=0.0)
    return value.to(COMPUTE), rest.to(COMPUTE)


@triton.jit
def multiply(q, q_rest, value, rest, PRECISION: tl.constexpr):
    """Scores fp32 [rows, keys] before scaling."""
    scores = tl.dot(q, tl.trans(value), input_precision=PRECISION)
    return tl.dot(q_rest, tl.trans(rest), scores, input_precision=PRECISION)


@triton.jit
def store_sums(
    acc, top, total, acc_out, top_out, total_out, place, real, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Partial results of rows and heads at `place` [rows], int64."""
    e = tl.arange(0, BLOCK_V)
    tl.store(top_out + place, top, mask=real)
    tl.store(total_out + place, total, mask=real)
    tl.store(acc_out + place[:, None] * VALUE_DIM + e[None, :], acc, mask=real[:, None] & (e < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=["num_spans"])
def attend_latent_spans(
    query,
    cache,
    blocks,
    lo,
    hi,
    offsets,
    first_rows,
    num_rows,
    acc_out,
    top_out,
    total_out,
    scale,
    num_spans,
    q_row,
    q_head,
    k_block,
    k_token,
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
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles of GROUP heads, programs); arguments as in `attend_spans`, with one cache [blocks, tokens, DIM]."""
    group = tl.program_id(0)
    program = tl.program_id(1)
    entries = tl.load(offsets + num_spans)
    position, end = share_of(program, tl.num_programs(1), entries)
    m = tl.arange(0, BLOCK_M)
    lane, head = m // GROUP, group * GROUP + m % GROUP
    span = position
    if position < end:
        span = list_of(offsets, num_spans, position, LISTS)
    while position < end:
        stop = tl.minimum(end, tl.load(offsets + span + 1))
        if stop > position:
            real = lane < ROWS
            if SINGLE:
                row = span + lane
            else:
                row = tl.load(first_rows + span) + lane
                real = real & (lane < tl.load(num_rows + span))
            q, q_rest = load_both(
                query + row.to(tl.int64) * q_row + head * q_head, real, VALUE_DIM, DIM, BLOCK_V, BLOCK_R, COMPUTE
            )
            acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            top = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            for first in tl.range(position * BLOCK_SIZE, stop * BLOCK_SIZE, BLOCK_N, num_stages=STAGES):
                block, token, seen = find_tokens(first, stop, blocks, lo, hi, BLOCK_SIZE, BLOCK_N)
                places = cache + block * k_block + token * k_token
                value, rest = load_both(places, seen, VALUE_DIM, DIM, BLOCK_V, BLOCK_R, COMPUTE)
                scores = multiply(q, q_rest, value, rest, PRECISION)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                acc, top, total = softmax_step(acc, top, total, scores, scale, value, COMPUTE, PRECISION, 0.0)
            place = ((program + span).to(tl.int64) * ROWS + lane) * HEADS + head
            store_sums(acc, top, total, acc_out, top_out, total_out, place, real, VALUE_DIM, BLOCK_V)
            position = stop
        span += 1


@triton.jit(do_not_specialize=["whole_counts", "num_tiles", "num_columns", "lo_span", "hi_span"])
def attend_latent_tiles(
    query,
    cache,
    order,
    row_spans,
    lo,
    hi,
    columns,
    column_blocks,
    whole_counts,
    offsets,
    acc_out,
    top_out,
    total_out,
    scale,
    num_tiles,
    num_columns,
    lo_span,
    lo_column,
    hi_span,
    hi_column,
    q_row,
    q_head,
    k_block,
    k_token,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LISTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles of GROUP heads, programs); arguments as in `attend_shared`, with one cache [blocks, tokens, DIM]."""
    group = tl.program_id(0)
    program = tl.program_id(1)
    position, end = share_of(program, tl.num_programs(1), tl.load(offsets + num_tiles))
    m = tl.arange(0, BLOCK_M)
    lane, head = m // GROUP, group * GROUP + m % GROUP
    tile = position
    if position < end:
        tile = list_of(offsets, num_tiles, position, LISTS)
    while position < end:
        begins = tl.load(offsets + tile)
        stop = tl.minimum(end, tl.load(offsets + tile + 1))
        if stop > position:
            row = tl.load(order + tile * ROWS + lane, mask=lane < ROWS, other=-1)
            real = row >= 0
            q, q_rest = load_both(
                query + row.to(tl.int64) * q_row + head * q_head, real, VALUE_DIM, DIM, BLOCK_V, BLOCK_R, COMPUTE
            )
            acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            top = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            tainted = tl.zeros([BLOCK_M], tl.int32)
            lists = tile.to(tl.int64) * num_columns
            whole = tl.minimum(begins + tl.load(whole_counts + tile), stop)
            from_list = (position - begins) * BLOCK_SIZE
            whole_end = (whole - begins) * BLOCK_SIZE
            for first in tl.range(from_list, whole_end, BLOCK_N, num_stages=STAGES):
                n = first + tl.arange(0, BLOCK_N)
                inside = n < whole_end
                block = tl.load(column_blocks + lists + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
                places = cache + block * k_block + (n % BLOCK_SIZE) * k_token
                value, rest = load_both(places, inside, VALUE_DIM, DIM, BLOCK_V, BLOCK_R, COMPUTE)
                scores = multiply(q, q_rest, value, rest, PRECISION)
                scores = tl.where(inside[None, :], scores, float("-inf"))
                acc, top, total = softmax_step(acc, top, total, scores, scale, value, COMPUTE, PRECISION, 0.0)
            span = tl.load(row_spans + row, mask=real, other=0).to(tl.int64)
            part_end = (stop - begins) * BLOCK_SIZE
            for first in tl.range(tl.maximum(from_list, whole_end), part_end, BLOCK_N, num_stages=1):
                n = first + tl.arange(0, BLOCK_N)
                inside = n < part_end
                token = n % BLOCK_SIZE
                column = tl.load(columns + lists + n // BLOCK_SIZE, mask=inside, other=0)
                block = tl.load(column_blocks + lists + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
                mask = real[:, None] & inside[None, :]
                lows = tl.load(lo + span[:, None] * lo_span + column[None, :] * lo_column, mask=mask, other=0)
                highs = tl.load(hi + span[:, None] * hi_span + column[None, :] * hi_column, mask=mask, other=0)
                visible = mask & (token[None, :] >= lows) & (token[None, :] < highs)
                places = cache + block * k_block + token * k_token
                value, rest = load_both(places, inside, VALUE_DIM, DIM, BLOCK_V, BLOCK_R, COMPUTE)
                scores = tl.where(visible, multiply(q, q_rest, value, rest, PRECISION), float("-inf"))
                value, tainted = without_garbage(value, visible, tainted)
                acc, top, total = softmax_step(acc, top, total, scores, scale, value, COMPUTE, PRECISION, 0.0)
            acc = tl.where(tainted[:, None] > 0, float("nan"), acc)
            place = ((program + tile).to(tl.int64) * ROWS + lane) * HEADS + head
            store_sums(acc, top, total, acc_out, top_out, total_out, place, real, VALUE_DIM, BLOCK_V)
            position = stop
        tile += 1


@triton.jit(do_not_specialize=["rows"])
def attend_latent_causal(
    query,
    key,
    starts,
    bounds,
    acc_out,
    top_out,
    total_out,
    scale,
    rows,
    q_row,
    q_head,
    k_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """New tokens among themselves. Grid (tiles of GROUP heads, tiles of ROWS rows), the longest tiles first.

    key: [rows, DIM]. starts, bounds: see `attend_causal`, for tiles of ROWS rows. acc_out: fp32 [tiles, ROWS, HEADS,
    VALUE_DIM], top_out and total_out without the last axis; written for rows with a causal part.
    """
    group = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    lowest, highest = tl.load(bounds + tile * 3), tl.load(bounds + tile * 3 + 1)
    stop = tl.load(bounds + tile * 3 + 2)
    m = tl.arange(0, BLOCK_M)
    lane, head = m // GROUP, group * GROUP + m % GROUP
    row = tile * ROWS + lane
    start = tl.load(starts + row, mask=(lane < ROWS) & (row < rows), other=2147483647)
    active = start <= row
    q, q_rest = load_both(
        query + row.to(tl.int64) * q_row + head * q_head, active, VALUE_DIM, DIM, BLOCK_V, BLOCK_R, COMPUTE
    )
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    tainted = tl.zeros([BLOCK_M], tl.int32)
    # keys that all rows see, in whole steps; the others are looked at one by one
    steps = tl.maximum(tl.minimum(tile * ROWS, stop) - highest, 0) // BLOCK_N
    common = highest + steps * BLOCK_N
    for first in tl.range(highest, common, BLOCK_N, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        value, rest = load_both(key + n.to(tl.int64) * k_row, n >= 0, VALUE_DIM, DIM, BLOCK_V, BLOCK_R, COMPUTE)
        scores = multiply(q, q_rest, value, rest, PRECISION)
        acc, top, total = softmax_step(acc, top, total, scores, scale, value, COMPUTE, PRECISION, 0.0)
    for part in tl.static_range(2):
        begin = common if part else lowest
        until = stop if part else tl.minimum(highest, stop)
        for first in tl.range(begin, until, BLOCK_N, num_stages=1):
            n = first + tl.arange(0, BLOCK_N)
            visible = (n[None, :] >= start[:, None]) & (n[None, :] <= row[:, None]) & (n < until)[None, :]
            value, rest = load_both(key + n.to(tl.int64) * k_row, n < until, VALUE_DIM, DIM, BLOCK_V, BLOCK_R, COMPUTE)
            scores = tl.where(visible, multiply(q, q_rest, value, rest, PRECISION), float("-inf"))
            value, tainted = without_garbage(value, visible, tainted)
            acc, top, total = softmax_step(acc, top, total, scores, scale, value, COMPUTE, PRECISION, 0.0)
    acc = tl.where(tainted[:, None] > 0, float("nan"), acc)
    place = (tile.to(tl.int64) * ROWS + lane) * HEADS + head
    store_sums(acc, top, total, acc_out, top_out, total_out, place, active, VALUE_DIM, BLOCK_V)
