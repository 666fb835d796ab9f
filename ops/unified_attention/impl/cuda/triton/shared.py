"""The shared part: each cached block is read once for a whole tile of rows, and only by tiles that use it."""

import triton
import triton.language as tl

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.softmax import (
    LOG2_E,
    LOWEST,
    list_of,
    share_of,
    softmax_step,
    without_garbage,
)


@triton.jit
def partly_seen(
    first,
    end,
    lists,
    columns,
    column_blocks,
    lo,
    hi,
    keys,
    values,
    span,
    raised,
    real,
    lo_span,
    lo_column,
    hi_span,
    hi_column,
    k_block,
    k_token,
    v_block,
    v_token,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    RISES: tl.constexpr,
):
    """Loads tokens [first, first + BLOCK_N) of a tile's list of columns: key, value, and bool [rows, tokens], the rows
    that see them.
    """
    n = first + tl.arange(0, BLOCK_N)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    inside = n < end
    token = n % BLOCK_SIZE
    column = tl.load(columns + lists + n // BLOCK_SIZE, mask=inside, other=0)
    block = tl.load(column_blocks + lists + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    mask = real[:, None] & inside[None, :]
    lows = tl.load(lo + span[:, None] * lo_span + column[None, :] * lo_column, mask=mask, other=0)
    highs = tl.load(hi + span[:, None] * hi_span + column[None, :] * hi_column, mask=mask, other=0)
    if RISES:
        lows += raised[:, None]
    visible = mask & (token[None, :] >= lows) & (token[None, :] < highs)
    k_place = block * k_block + token * k_token
    v_place = block * v_block + token * v_token
    k = tl.load(keys + k_place[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
    v = tl.load(values + v_place[:, None] + e[None, :], mask=inside[:, None] & (e < VALUE_DIM)[None, :], other=0.0)
    return k, v, visible


@triton.jit
def _biases(
    first,
    end,
    lists,
    columns,
    lo,
    span,
    at_row,
    slope,
    real,
    lo_span,
    lo_column,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """fp32 [rows, tokens]: the slopes times the distances of tokens [first, first + BLOCK_N) of a tile's list."""
    n = first + tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        column = tl.load(columns + lists + first // BLOCK_SIZE, mask=first < end, other=0)
        begin = tl.load(lo + span * lo_span + column * lo_column, mask=real, other=0)[:, None]
    else:
        column = tl.load(columns + lists + n // BLOCK_SIZE, mask=n < end, other=0)
        mask = real[:, None] & (n < end)[None, :]
        begin = tl.load(lo + span[:, None] * lo_span + column[None, :] * lo_column, mask=mask, other=0)
    far = at_row[:, None] + begin - (n % BLOCK_SIZE)[None, :]
    return slope[:, None] * far.to(tl.float32)


@triton.jit(do_not_specialize=["whole_counts", "num_tiles", "num_columns", "lo_span", "hi_span"])
def attend_shared(
    query,
    key_cache,
    value_cache,
    key_tiles,
    value_tiles,
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
    rise,
    slopes,
    positions,
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
    k_head,
    v_block,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
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
    DESCRIBED: tl.constexpr,
    STAGES: tl.constexpr,
    RISES: tl.constexpr,
    SLOPES: tl.constexpr,
):
    """Grid (KV heads, programs): each program takes an even share of the (tile, block) pairs in use.

    DESCRIBED: key_tiles and value_tiles are descriptors of the caches as [blocks, kv heads, block size, dim] in tiles
        [1, 1, BLOCK_N, dim], and BLOCK_N divides the block size.

    order, columns, column_blocks, whole_counts: see `list_columns`; offsets: int32 [tiles + 1] of their counts.
    acc_out: fp32 [programs + tiles, ROWS, HEADS, VALUE_DIM], top_out and total_out without the last axis: the partial
        result of program p for tile t is at p + t.
    rise: as in SharedPart, read if RISES. SLOPES: scores are less by fp32 slopes [heads] times distances; int64
        positions [rows].
    """
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    pairs = tl.load(offsets + num_tiles)
    position, end = share_of(program, tl.num_programs(1), pairs)
    m = tl.arange(0, BLOCK_M)
    lane, head = m // GROUP, kv_head * GROUP + m % GROUP
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    keys = key_cache + kv_head.to(tl.int64) * k_head
    values = value_cache + kv_head.to(tl.int64) * v_head
    tile = position
    if position < end:
        tile = list_of(offsets, num_tiles, position, LISTS)
    while position < end:
        begins = tl.load(offsets + tile)
        stop = tl.minimum(end, tl.load(offsets + tile + 1))
        if stop > position:
            row = tl.load(order + tile * ROWS + lane, mask=lane < ROWS, other=-1)
            real = row >= 0
            row64 = row.to(tl.int64)
            q = tl.load(
                query + row64[:, None] * q_row + head[:, None] * q_head + d[None, :],
                mask=real[:, None] & (d < DIM)[None, :],
                other=0.0,
            ).to(COMPUTE)
            if SLOPES:
                slope = tl.load(slopes + head) * LOG2_E
                at_row = tl.load(positions + row, mask=real, other=0).to(tl.int32)
                of_row = tl.load(row_spans + row, mask=real, other=0).to(tl.int64)
            acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            top = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            lists = tile.to(tl.int64) * num_columns
            whole = tl.minimum(begins + tl.load(whole_counts + tile), stop)
            from_list = (position - begins) * BLOCK_SIZE
            whole_end = (whole - begins) * BLOCK_SIZE
            # one step ahead, see `attend_own`
            ahead = tl.load(column_blocks + lists + from_list // BLOCK_SIZE)
            for first in tl.range(from_list, whole_end, BLOCK_N, num_stages=STAGES):
                if DESCRIBED:
                    block32, inner = ahead, first % BLOCK_SIZE
                    after = tl.minimum(first + BLOCK_N, whole_end - BLOCK_N)
                    ahead = tl.load(column_blocks + lists + after // BLOCK_SIZE)
                    k = key_tiles.load([block32, kv_head, inner, 0]).reshape(BLOCK_N, BLOCK_D).to(COMPUTE)
                    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                    v = value_tiles.load([block32, kv_head, inner, 0]).reshape(BLOCK_N, BLOCK_V).to(COMPUTE)
                else:
                    n = first + tl.arange(0, BLOCK_N)
                    inside = n < whole_end
                    token = n % BLOCK_SIZE
                    block = tl.load(column_blocks + lists + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
                    k_place = block * k_block + token * k_token
                    v_place = block * v_block + token * v_token
                    k = tl.load(
                        keys + k_place[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0
                    ).to(COMPUTE)
                    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                    scores = tl.where(inside[None, :], scores, float("-inf"))
                    v = tl.load(
                        values + v_place[:, None] + e[None, :],
                        mask=inside[:, None] & (e < VALUE_DIM)[None, :],
                        other=0.0,
                    ).to(COMPUTE)
                if SLOPES:
                    bias = _biases(
                        first, whole_end, lists, columns, lo, of_row, at_row, slope, real, lo_span, lo_column,
                        BLOCK_SIZE, BLOCK_N,
                    )  # fmt: skip
                    acc, top, total = softmax_step(acc, top, total, scores, scale, v, COMPUTE, PRECISION, CAP, bias)
                else:
                    acc, top, total = softmax_step(acc, top, total, scores, scale, v, COMPUTE, PRECISION, CAP)
            span = tl.load(row_spans + row, mask=real, other=0).to(tl.int64)
            raised = 0
            if RISES:
                raised = tl.load(rise + row, mask=real, other=0).to(tl.int32)
            part_end = (stop - begins) * BLOCK_SIZE
            for first in tl.range(tl.maximum(from_list, whole_end), part_end, BLOCK_N, num_stages=1):
                k, v, visible = partly_seen(
                    first, part_end, lists, columns, column_blocks, lo, hi, keys, values, span, raised, real, lo_span,
                    lo_column, hi_span, hi_column, k_block, k_token, v_block, v_token, DIM, VALUE_DIM, BLOCK_SIZE,
                    BLOCK_N, BLOCK_D, BLOCK_V, RISES,
                )  # fmt: skip
                scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
                scores = tl.where(visible, scores, float("-inf"))
                v = v.to(COMPUTE)
                if SLOPES:
                    bias = _biases(
                        first, part_end, lists, columns, lo, of_row, at_row, slope, real, lo_span, lo_column,
                        BLOCK_SIZE, BLOCK_N,
                    )  # fmt: skip
                    acc, top, total = softmax_step(acc, top, total, scores, scale, v, COMPUTE, PRECISION, CAP, bias)
                else:
                    acc, top, total = softmax_step(acc, top, total, scores, scale, v, COMPUTE, PRECISION, CAP)
            # a value that is not finite, times the weight 0 of a row that does not see it: look at every value
            if tl.max(tl.max(tl.where(tl.abs(acc) < float("inf"), 0, 1), 1), 0) > 0:
                acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
                top = tl.full([BLOCK_M], LOWEST, tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                tainted = tl.zeros([BLOCK_M], tl.int32)
                for first in tl.range(from_list, part_end, BLOCK_N, num_stages=1):
                    k, v, visible = partly_seen(
                        first, part_end, lists, columns, column_blocks, lo, hi, keys, values, span, raised, real,
                        lo_span, lo_column, hi_span, hi_column, k_block, k_token, v_block, v_token, DIM, VALUE_DIM,
                        BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, RISES,
                    )  # fmt: skip
                    scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
                    scores = tl.where(visible, scores, float("-inf"))
                    v, tainted = without_garbage(v, visible, tainted)
                    v = v.to(COMPUTE)
                    if SLOPES:
                        bias = _biases(
                            first, part_end, lists, columns, lo, of_row, at_row, slope, real, lo_span, lo_column,
                            BLOCK_SIZE, BLOCK_N,
                        )  # fmt: skip
                        acc, top, total = softmax_step(acc, top, total, scores, scale, v, COMPUTE, PRECISION, CAP, bias)
                    else:
                        acc, top, total = softmax_step(acc, top, total, scores, scale, v, COMPUTE, PRECISION, CAP)
                acc = tl.where(tainted[:, None] > 0, float("nan"), acc)
            place = ((program + tile).to(tl.int64) * ROWS + lane) * HEADS + head
            tl.store(top_out + place, top, mask=real)
            tl.store(total_out + place, total, mask=real)
            tl.store(
                acc_out + place[:, None] * VALUE_DIM + e[None, :], acc, mask=real[:, None] & (e < VALUE_DIM)[None, :]
            )
            position = stop
        tile += 1
