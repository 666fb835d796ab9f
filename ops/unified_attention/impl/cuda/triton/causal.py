"""The causal part: tiles of rows with the new keys of their own requests only."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.softmax import (
    LOG2_E,
    LOWEST,
    add_sink,
    softmax_step,
    without_garbage,
)


@triton.jit(do_not_specialize=["rows"])
def find_bounds(starts, bounds, rows, BLOCK_M: tl.constexpr):
    """For each tile of rows, int32 [tiles, 3]: first key that any row sees, first key that all rows see, end of rows.

    Counts only rows with a causal part; a tile without such rows has three zeros: a loop from a large number to 0 reads
    ahead of itself, where the number plus a step is negative, and so less than 0. starts: see `attend_causal`.
    """
    tile = tl.program_id(0)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.load(starts + row, mask=row < rows, other=2147483647)
    active = start <= row
    lowest = tl.min(tl.where(active, start, 2147483647), 0)
    tl.store(bounds + tile * 3, tl.where(lowest == 2147483647, 0, lowest))
    tl.store(bounds + tile * 3 + 1, tl.max(tl.where(active, start, 0), 0))
    tl.store(bounds + tile * 3 + 2, tl.max(tl.where(active, row, -1), 0) + 1)


@triton.jit
def load_tile(
    tiles,
    tokens,
    first,
    head,
    row_stride,
    head_stride,
    rows,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Tokens [first, first + BLOCK_N) of a head, 0 beyond the last row."""
    if DESCRIBED:
        return tiles.load([first, head * DIM])
    else:
        n, d = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        places = tokens + n.to(tl.int64)[:, None] * row_stride + head * head_stride + d[None, :]
        return tl.load(places, mask=(n < rows)[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def store_tile(
    acc,
    top,
    total,
    first,
    active,
    head,
    rows,
    cached,
    out,
    out_tiles,
    acc_out,
    top_out,
    total_out,
    sinks,
    o_row,
    o_head,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALONE: tl.constexpr,
    SAVES: tl.constexpr,
    DESCRIBED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Writes rows [first, first + BLOCK_M) of a head to the result, or their sums to scratch; see `attend_causal`."""
    # a row that takes no part may have summed up keys: sums that are not finite are marked in `broken` and computed
    # again
    if SINKS:
        whole, sums = add_sink(acc, top, total, tl.load(sinks + head))
    else:
        whole, sums = acc, total
    inverse = tl.where(active, 1.0 / tl.where(sums == 0.0, 1.0, sums), 0.0)
    result = (whole * inverse[:, None]).to(out.dtype.element_ty)
    if DESCRIBED and ALONE:
        out_tiles.store([first, head * VALUE_DIM], result)
    else:
        row = first + tl.arange(0, BLOCK_M)
        row64, e = row.to(tl.int64), tl.arange(0, BLOCK_V)
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
            places = acc_out + place[:, None] * VALUE_DIM + e[None, :]
            tl.store(places, acc, mask=saved[:, None] & (e < VALUE_DIM)[None, :])
        places = out + row64[:, None] * o_row + head * o_head + e[None, :]
        tl.store(places, result, mask=in_out[:, None] & (e < VALUE_DIM)[None, :])


@triton.jit
def begin_sums(
    row,
    active,
    head,
    own_place,
    own_acc,
    own_top,
    own_total,
    own_offsets,
    own_lists,
    own_programs,
    HEADS: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CONTINUES: tl.constexpr,
):
    """Acc, top, total of rows of a head before their new keys: empty, or the partial results of their own blocks."""
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if CONTINUES:
        e = tl.arange(0, BLOCK_V)
        at = tl.load(own_place + row, mask=active, other=-1)
        index, lane = tl.maximum(at, 0) // OWN_ROWS, tl.maximum(at, 0) % OWN_ROWS
        begin, end = tl.load(own_offsets + index).to(tl.int64), tl.load(own_offsets + index + 1).to(tl.int64)
        entries = tl.maximum(tl.load(own_offsets + own_lists).to(tl.int64), 1)
        # the programs that hold the first and the last entry, see `share_of`
        sharing = tl.minimum(own_programs, entries)
        first, last = ((begin + 1) * sharing - 1) // entries, (end * sharing - 1) // entries
        pieces = tl.where(at >= 0, last - first + 1, 0).to(tl.int32)
        for piece in range(tl.max(pieces, 0)):
            there = piece < pieces
            slot = ((first + piece + index) * OWN_ROWS + lane) * HEADS + head
            more_top = tl.load(own_top + slot, mask=there, other=LOWEST)
            more_total = tl.load(own_total + slot, mask=there, other=0.0)
            places = own_acc + slot[:, None] * VALUE_DIM + e[None, :]
            more = tl.load(places, mask=there[:, None] & (e < VALUE_DIM)[None, :], other=0.0)
            new_top = tl.maximum(top, more_top)
            shrink, weight = tl.exp2(top - new_top), tl.exp2(more_top - new_top)
            total = total * shrink + more_total * weight
            acc = acc * shrink[:, None] + more * weight[:, None]
            top = new_top
    return acc, top, total


@triton.jit
def distance_bias(slopes, head, row, first, BLOCK_N: tl.constexpr):
    """fp32 [rows, BLOCK_N]: a head's slope times the distance of new tokens [first, first + BLOCK_N) from each row."""
    far = row[:, None] - (first + tl.arange(0, BLOCK_N))[None, :]
    return tl.load(slopes + head) * LOG2_E * far.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "own_lists", "own_programs"])
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
    own_place,
    own_acc,
    own_top,
    own_total,
    own_offsets,
    own_lists,
    own_programs,
    sinks,
    slopes,
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
    CAP: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ALONE: tl.constexpr,
    SAVES: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    CONTINUES: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One tile of rows and one head per program; the longest tiles start first.

    starts: int32 [rows] first row that a row sees; later than the row itself if it has no causal part.
    bounds: from `find_bounds`.
    cached: int32 [rows] whether a row also has cached blocks (read if SAVES): its sums go to acc_out [rows, heads,
        value_dim], top_out and total_out [rows, heads], all fp32, instead of out.
    broken: int32 [tiles * heads], set to 1 if a result is not finite: `repair_causal` computes the tile again.
    DESCRIBED: the `_tiles` are descriptors of [rows, heads * dim]: query and out in tiles [BLOCK_M, dim], key and value
        in tiles [BLOCK_N, dim].
    own_place .. own_programs, OWN_ROWS: if CONTINUES, partial results of own blocks in the form that the merge takes,
        with lists of ROWS rows: the sums start from them.
    sinks: fp32 [heads], read if SINKS. slopes: fp32 [heads] of distances, read if SLOPES.
    ALONE: the step has no other part, so rows without a causal part become zeros here.
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
    acc, top, total = begin_sums(
        row, start <= row, head, own_place, own_acc, own_top, own_total, own_offsets, own_lists, own_programs, HEADS,
        OWN_ROWS, VALUE_DIM, BLOCK_M, BLOCK_V, CONTINUES,
    )  # fmt: skip
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
        if SLOPES:
            bias = distance_bias(slopes, head, row, first, BLOCK_N)
            v = v.to(COMPUTE)
            acc, top, total = softmax_step(acc, top, total, scores, scale, v, COMPUTE, PRECISION, CAP, bias)
        else:
            acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION, CAP)
    # a value that is not finite, times the weight 0 of a row that does not see it
    found = tl.abs(tl.sum(acc, 1)) < float("inf")
    tl.store(broken + tile * HEADS + head + tl.zeros([BLOCK_M], tl.int32), 1, mask=found == 0)
    store_tile(
        acc, top, total, tile * BLOCK_M, start <= row, head, rows, cached, out, out_tiles, acc_out, top_out, total_out,
        sinks, o_row, o_head, HEADS, VALUE_DIM, BLOCK_M, BLOCK_V, ALONE, SAVES, DESCRIBED, SINKS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "tiles", "own_lists", "own_programs"])
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
    own_place,
    own_acc,
    own_top,
    own_total,
    own_offsets,
    own_lists,
    own_programs,
    sinks,
    slopes,
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
    CAP: tl.constexpr,
    ALONE: tl.constexpr,
    SAVES: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    CONTINUES: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    LOOKED_AT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Computes the tiles in `broken` again, and resets it to 0; LOOKED_AT pairs of a tile and a head per program.

    EARLY: it starts before `attend_causal` ends, and waits for it. The other arguments are as in `attend_causal`.
    """
    if EARLY:
        gdc_wait()
    begin = tl.program_id(0) * LOOKED_AT
    index = begin + tl.arange(0, LOOKED_AT)
    flags = tl.load(broken + index, mask=index < tiles * HEADS, other=0)
    if tl.max(flags, 0) > 0:
        tl.store(broken + index, tl.zeros([LOOKED_AT], tl.int32), mask=index < tiles * HEADS)
        for pair in range(begin, tl.minimum(begin + LOOKED_AT, tiles * HEADS)):
            # not from memory: a late warp would read the value that another has reset, and skip the work
            if tl.max(tl.where(index == pair, flags, 0), 0) > 0:
                tile, head = pair // HEADS, pair % HEADS
                kv_head = head // GROUP
                lowest, stop = tl.load(bounds + tile * 3), tl.load(bounds + tile * 3 + 2)
                row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
                start = tl.load(starts + row, mask=row < rows, other=2147483647)
                acc, top, total = begin_sums(
                    row, start <= row, head, own_place, own_acc, own_top, own_total, own_offsets, own_lists,
                    own_programs, HEADS, OWN_ROWS, VALUE_DIM, BLOCK_M, BLOCK_V, CONTINUES,
                )  # fmt: skip
                tainted = tl.max(tl.where(tl.abs(acc) < float("inf"), 0, 1), 1)
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
                    v = v.to(COMPUTE)
                    if SLOPES:
                        bias = distance_bias(slopes, head, row, first, BLOCK_N)
                        acc, top, total = softmax_step(acc, top, total, scores, scale, v, COMPUTE, PRECISION, CAP, bias)
                    else:
                        acc, top, total = softmax_step(acc, top, total, scores, scale, v, COMPUTE, PRECISION, CAP)
                acc = tl.where(tainted[:, None] > 0, float("nan"), acc)
                store_tile(
                    acc, top, total, tile * BLOCK_M, start <= row, head, rows, cached, out, None, acc_out, top_out,
                    total_out, sinks, o_row, o_head, HEADS, VALUE_DIM, BLOCK_M, BLOCK_V, ALONE, SAVES, False, SINKS,
                )  # fmt: skip
