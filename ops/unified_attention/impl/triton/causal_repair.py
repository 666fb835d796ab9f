"""Tiles of the causal part whose first result is not finite, once more and looking at every value.

A kernel of its own: in `attend_causal` these lines cost registers, 3 % of a long prompt and 15 % of short ones.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from vllm_gaudi_ucm.ops.unified_attention.impl.triton.causal_tiles import load_tile, store_tile
from vllm_gaudi_ucm.ops.unified_attention.impl.triton.softmax import LOWEST, softmax_step, without_garbage


@triton.jit(do_not_specialize=["tiles"])
def repair_causal(
    query,
    key,
    value,
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
    tiles,
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
    LOOKED_AT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """LOOKED_AT pairs of a tile and a head per program; those in `broken` are computed again, and it is set to 0.

    EARLY: it has started before `attend_causal` has ended, and waits for it. The other arguments are those of that.
    """
    if EARLY:
        gdc_wait()
    begin = tl.program_id(0) * LOOKED_AT
    index = begin + tl.arange(0, LOOKED_AT)
    flags = tl.load(broken + index, mask=index < tiles * HEADS, other=0)
    if tl.max(flags, 0) > 0:
        for pair in range(begin, tl.minimum(begin + LOOKED_AT, tiles * HEADS)):
            if tl.load(broken + pair) > 0:
                tl.store(broken + pair, 0)
                tile, head = pair // HEADS, pair % HEADS
                kv_head = head // GROUP
                lowest, stop = tl.load(bounds + tile * 3), tl.load(bounds + tile * 3 + 2)
                row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
                start = tl.load(starts + row, mask=row < rows, other=2147483647)
                acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
                top = tl.full([BLOCK_M], LOWEST, tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                tainted = tl.zeros([BLOCK_M], tl.int32)
                q = load_tile(
                    None, query, tile * BLOCK_M, head, q_row, q_head, rows, DIM, BLOCK_D, BLOCK_M, False
                ).to(COMPUTE)  # fmt: skip
                for first in tl.range(lowest, stop, BLOCK_N, num_stages=1):
                    n = first + tl.arange(0, BLOCK_N)
                    k = load_tile(None, key, first, kv_head, k_row, k_head, rows, DIM, BLOCK_D, BLOCK_N, False)
                    v = load_tile(None, value, first, kv_head, v_row, v_head, rows, VALUE_DIM, BLOCK_V, BLOCK_N, False)
                    visible = (n[None, :] >= start[:, None]) & (n[None, :] <= row[:, None])
                    scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
                    scores = tl.where(visible, scores, float("-inf"))
                    v, tainted = without_garbage(v, visible, tainted)
                    acc, top, total = softmax_step(
                        acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION
                    )  # fmt: skip
                acc = tl.where(tainted[:, None] > 0, float("nan"), acc)
                store_tile(
                    acc, top, total, tile * BLOCK_M, start <= row, head, rows, cached, out, None, acc_out, top_out,
                    total_out, o_row, o_head, HEADS, VALUE_DIM, BLOCK_M, BLOCK_V, ALONE, SAVES, False,
                )  # fmt: skip
