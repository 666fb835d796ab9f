"""The causal part: new tokens among themselves, tiles of rows against the keys of their own requests only."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from vllm_gaudi_ucm.ops.unified_attention.impl.triton.causal_tiles import load_tile, store_tile
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.softmax import LOWEST, softmax_step


@triton.jit
def attend_causal(
    query,
    key,
    value,
    query_tiles,
    key_tiles,
    value_tiles,
    out_tiles,
    starts,
    bounds,
    cached,
    broken,
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
    EARLY: tl.constexpr,
):
    """One tile of rows and one head per program; the longest tiles start first.

    starts: int32 [rows] first row that a row sees; beyond the row itself where it takes no part. bounds: `find_bounds`.
    cached: int32 [rows] whether a row has cached blocks too (read if SAVES): its sums go to acc_out [rows, heads,
        value_dim], top_out and total_out [rows, heads], all fp32, and not to out.
    broken: int32 [tiles * heads], set to 1 where a result is not finite: `repair_causal` computes the tile again.
    DESCRIBED: the `_tiles` are descriptors of [rows, heads * dim], of query and out in tiles [BLOCK_M, dim], of key and
        value in tiles [BLOCK_N, dim].
    ALONE: the step has no other part, so rows that take no part become zeros here.
    EARLY: the repair may start and wait inside.
    """
    if EARLY:
        gdc_launch_dependents()
    head = tl.program_id(0) % HEADS
    tile = tl.num_programs(0) // HEADS - 1 - tl.program_id(0) // HEADS
    lowest = tl.load(bounds + tile * 3)
    highest = tl.load(bounds + tile * 3 + 1)
    stop = tl.load(bounds + tile * 3 + 2)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.load(starts + row, mask=row < rows, other=2147483647)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    kv_head = head // GROUP
    q = load_tile(
        query_tiles, query, tile * BLOCK_M, head, q_row, q_head, rows, DIM, BLOCK_D, BLOCK_M, DESCRIBED
    ).to(COMPUTE)  # fmt: skip
    for first in tl.range(lowest, stop, BLOCK_N, num_stages=STAGES):
        k = load_tile(key_tiles, key, first, kv_head, k_row, k_head, rows, DIM, BLOCK_D, BLOCK_N, DESCRIBED)
        v = load_tile(value_tiles, value, first, kv_head, v_row, v_head, rows, VALUE_DIM, BLOCK_V, BLOCK_N, DESCRIBED)
        scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
        # keys before some row's request, or after some row; most steps have neither
        if (first < highest) | (first + BLOCK_N > tile * BLOCK_M):
            n = first + tl.arange(0, BLOCK_N)
            visible = (n[None, :] >= start[:, None]) & (n[None, :] <= row[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION)
    # a value that is not finite, times the weight 0 of a row that does not see it
    found = tl.abs(tl.sum(acc, 1)) < float("inf")
    tl.store(broken + tile * HEADS + head + tl.zeros([BLOCK_M], tl.int32), 1, mask=found == 0)
    store_tile(
        acc, top, total, tile * BLOCK_M, start <= row, head, rows, cached, out, out_tiles, acc_out, top_out, total_out,
        o_row, o_head, HEADS, VALUE_DIM, BLOCK_M, BLOCK_V, ALONE, SAVES, DESCRIBED,
    )  # fmt: skip
