"""The causal part: new tokens among themselves, tiles of rows against the keys of their own requests only."""

import triton
import triton.language as tl

from vllm_gaudi_ucm.ops.unified_attention.impl.triton.softmax import softmax_step, without_garbage


@triton.jit(do_not_specialize=["rows"])
def find_bounds(starts, bounds, rows, BLOCK_M: tl.constexpr):
    """For each tile of rows, int32 [tiles, 3]: first key that any row sees, first that all see, last row's end.

    Of rows that take part; a tile without any has the end 0. starts: see `attend_causal`.
    """
    tile = tl.program_id(0)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.load(starts + row, mask=row < rows, other=2147483647)
    active = start <= row
    tl.store(bounds + tile * 3, tl.min(tl.where(active, start, 2147483647), 0))
    tl.store(bounds + tile * 3 + 1, tl.max(tl.where(active, start, 0), 0))
    tl.store(bounds + tile * 3 + 2, tl.max(tl.where(active, row, -1), 0) + 1)


@triton.jit
def _tile(
    tiles,
    tokens,
    first,
    kv_head,
    stride,
    rows,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Tokens [first, first + BLOCK_N) of a kv head, 0 beyond the last row."""
    if DESCRIBED:
        return tiles.load([first, kv_head * DIM])
    else:
        n, d = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        places = tokens + n.to(tl.int64)[:, None] * stride + d[None, :]
        return tl.load(places, mask=(n < rows)[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def attend_causal(
    query,
    key,
    value,
    key_tiles,
    value_tiles,
    starts,
    bounds,
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
    DESCRIBED: tl.constexpr,
    ALONE: tl.constexpr,
    SAVES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of rows and one head per program; the longest tiles start first.

    starts: int32 [rows] first row that a row sees; beyond the row itself where it takes no part. bounds: `find_bounds`.
    cached: int32 [rows] whether a row has cached blocks too (read if SAVES): its sums go to acc_out [rows, heads,
        value_dim], top_out and total_out [rows, heads], all fp32, and not to out.
    DESCRIBED: key_tiles and value_tiles are descriptors of [rows, kv heads * dim] in tiles [BLOCK_N, dim].
    ALONE: the step has no other part, so rows that take no part become zeros here.
    """
    head = tl.program_id(0) % HEADS
    tile = tl.num_programs(0) // HEADS - 1 - tl.program_id(0) // HEADS
    lowest = tl.load(bounds + tile * 3)
    highest = tl.load(bounds + tile * 3 + 1)
    stop = tl.load(bounds + tile * 3 + 2)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.load(starts + row, mask=row < rows, other=2147483647)
    active = start <= row
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    row64 = row.to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    kv_head = head // GROUP
    keys = key + kv_head * k_head
    values = value + kv_head * v_head
    q = tl.load(
        query + row64[:, None] * q_row + head * q_head + d[None, :],
        mask=(row < rows)[:, None] & (d < DIM)[None, :],
        other=0.0,
    ).to(COMPUTE)
    # [lowest, all_see) is before some row's request; [all_see, diagonal) is seen by every row; the rest by some
    all_see = lowest + tl.cdiv(highest - lowest, BLOCK_N) * BLOCK_N
    diagonal = all_see + tl.maximum(tile * BLOCK_M + 1 - all_see, 0) // BLOCK_N * BLOCK_N
    for first in tl.range(all_see, diagonal, BLOCK_N, num_stages=STAGES):
        k = _tile(key_tiles, keys, first, kv_head, k_row, rows, DIM, BLOCK_D, BLOCK_N, DESCRIBED)
        scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
        v = _tile(value_tiles, values, first, kv_head, v_row, rows, VALUE_DIM, BLOCK_V, BLOCK_N, DESCRIBED)
        acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION)
    ends = tl.minimum(all_see, stop)
    count = tl.cdiv(tl.maximum(ends - lowest, 0), BLOCK_N) + tl.cdiv(tl.maximum(stop - diagonal, 0), BLOCK_N)
    for index in tl.range(0, count, num_stages=1):
        before = lowest + index * BLOCK_N
        first = tl.where(before < ends, before, diagonal + before - all_see)
        n = first + tl.arange(0, BLOCK_N)
        k = _tile(key_tiles, keys, first, kv_head, k_row, rows, DIM, BLOCK_D, BLOCK_N, DESCRIBED)
        v = _tile(value_tiles, values, first, kv_head, v_row, rows, VALUE_DIM, BLOCK_V, BLOCK_N, DESCRIBED)
        visible = (n[None, :] >= start[:, None]) & (n[None, :] <= row[:, None])
        scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
        scores = tl.where(visible, scores, float("-inf"))
        acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION)
    # a value that is not finite, times the weight 0 of a row that does not see it: once more, looking at every value
    if tl.max(tl.max(tl.where(tl.abs(acc) < float("inf"), 0, 1), 1), 0) > 0:
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        tainted = tl.zeros([BLOCK_M], tl.int32)
        for first in tl.range(lowest, stop, BLOCK_N, num_stages=1):
            n = first + tl.arange(0, BLOCK_N)
            k = _tile(key_tiles, keys, first, kv_head, k_row, rows, DIM, BLOCK_D, BLOCK_N, DESCRIBED)
            v = _tile(value_tiles, values, first, kv_head, v_row, rows, VALUE_DIM, BLOCK_V, BLOCK_N, DESCRIBED)
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
        tl.store(acc_out + place[:, None] * VALUE_DIM + e[None, :], acc, mask=saved[:, None] & (e < VALUE_DIM)[None, :])
    acc = tl.where(active[:, None], acc / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)
    tl.store(
        out + row64[:, None] * o_row + head * o_head + e[None, :],
        acc.to(out.dtype.element_ty),
        mask=in_out[:, None] & (e < VALUE_DIM)[None, :],
    )
