"""Scores of few rows in two launches: estimates by programs that stream summaries, then sums and shares at once."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _log_mean(of_boxes, v, log_rest, log_all, VECTORS: tl.constexpr):
    """Fp32 [candidates, lines] for products [candidates, boxes, lines]; values that are not finite become NaN."""
    if VECTORS > 1:
        of_boxes = tl.where((v == 0)[None, :, None], of_boxes + log_rest, of_boxes)
    of_boxes = tl.where((v < VECTORS)[None, :, None], of_boxes, float("-inf"))
    # a NaN is not among the largest, and comes back with the sum
    top = tl.max(of_boxes, 1)
    base = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    found = base + tl.log(tl.sum(tl.exp(of_boxes - base[:, None, :]), 1))
    if VECTORS > 1:
        found -= log_all
    return tl.where(tl.abs(found) < float("inf"), found, float("nan"))


@triton.jit
def _tiles(ranges, s, num_spans, parts, BLOCK_C: tl.constexpr):
    """Returns int32 tiles of each span `s`, tiles of all spans, and how many of them each of this many parts has."""
    begins = tl.load(ranges + 2 * s, mask=s < num_spans, other=0)
    tiles = tl.cdiv(tl.load(ranges + 2 * s + 1, mask=s < num_spans, other=0) - begins, BLOCK_C)
    total = tl.sum(tiles, 0)
    return tiles, total, tl.cdiv(total, parts)


@triton.jit
def _add(top, total, tops, totals, AXIS: tl.constexpr):
    """The largest estimate and the sum of a softmax, and others along an axis, as one. Empty ones are -inf and 0."""
    new = tl.maximum(top, tl.max(tops, AXIS))
    base = tl.where(new == float("-inf"), 0.0, new)
    added = tl.sum(tl.exp(tops - tl.expand_dims(base, AXIS)) * totals, AXIS)
    return new, total * tl.exp(top - base) + added


@triton.jit(do_not_specialize=["candidates", "num_spans"])
def stream_boxes(
    query, summaries, blocks, spans, ranges, first_rows, num_rows, estimates, tops, sums, scale, log_rest, log_all,
    candidates, num_spans, q_row, q_head, s_block, s_vector, s_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VECTORS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Like `estimate_boxes`, where BLOCK_N lines hold all ROWS rows of a span: grid (programs x KV heads).

    Each program has an even share of the tiles of all spans, whatever span they belong to, and copies the summaries of
    the next tiles while it multiplies one. The query of a span stays in registers for all tiles of the span.

    ranges: int32 [spans, 2], see `find_candidates`. BLOCK_S >= num_spans.
    tops, sums: fp32 [parts + spans, ROWS x HEADS] of the softmax over the candidates of a span that a part has seen,
        without NaN, in line part + span: parts and spans are both in the order of tiles, so that no two share one.
    EARLY: the following `share_blocks` starts early.
    """
    if EARLY:
        gdc_launch_dependents()
    kv_heads: tl.constexpr = HEADS // GROUP
    kv_head, part, parts = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads, tl.num_programs(0) // kv_heads
    s = tl.arange(0, BLOCK_S)
    tiles, total, each = _tiles(ranges, s, num_spans, parts, BLOCK_C)
    ends = tl.cumsum(tiles, 0)
    at = part * each
    stop = tl.minimum(at + each, total)
    m, v, d, n = tl.arange(0, BLOCK_C * BLOCK_V), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    lane, head = n // GROUP, kv_head * GROUP + n % GROUP
    source = summaries + kv_head * s_head
    while at < stop:
        span = tl.sum((ends <= at).to(tl.int32), 0)
        before = tl.sum(tl.where(s < span, tiles, 0), 0)
        until = tl.minimum(stop, before + tl.sum(tl.where(s == span, tiles, 0), 0))
        begin, end = tl.load(ranges + 2 * span), tl.load(ranges + 2 * span + 1)
        first, count = tl.load(first_rows + span), tl.load(num_rows + span)
        real = lane < count
        q = tl.load(
            query + (first + lane)[None, :] * q_row + head[None, :] * q_head + d[:, None],
            mask=(real & (lane < ROWS))[None, :] & (d < DIM)[:, None],
            other=0.0,
        ).to(COMPUTE)
        # separately for each candidate of a tile: threads sum with each other once, after the loop
        top = tl.full([BLOCK_C, BLOCK_N], float("-inf"), tl.float32)
        sum_of = tl.zeros([BLOCK_C, BLOCK_N], tl.float32)
        c = begin + (at - before) * BLOCK_C + tl.arange(0, BLOCK_C)
        owner = tl.load(spans + c, mask=c < end, other=-1)
        for tile in tl.range(at - before, until - before, num_stages=STAGES):
            c = begin + tile * BLOCK_C + tl.arange(0, BLOCK_C)
            # other candidates and pads may come between the first and the last candidate of a span
            mine = owner == span
            # a tile ahead, as no other load waits for it
            owner = tl.load(spans + c + BLOCK_C, mask=c + BLOCK_C < end, other=-1)
            own = begin + tile * BLOCK_C + m // BLOCK_V
            block = tl.load(blocks + own, mask=own < end, other=0)
            read = (block != 0) & (m % BLOCK_V < VECTORS)
            place = block * s_block + (m % BLOCK_V) * s_vector
            mask = read[:, None] if DIM == BLOCK_D else read[:, None] & (d < DIM)[None, :]
            boxes = tl.load(source + place[:, None] + d[None, :], mask=mask, other=0.0).to(COMPUTE)
            products = tl.dot(boxes, q, input_precision=PRECISION) * scale
            found = _log_mean(tl.reshape(products, [BLOCK_C, BLOCK_V, BLOCK_N]), v, log_rest, log_all, VECTORS)
            found = tl.where(real[None, :], found, float("-inf"))
            target = estimates + (lane * HEADS + head).to(tl.int64)[None, :] * candidates + c[:, None]
            tl.store(target, found, mask=mine[:, None] & (lane < ROWS)[None, :])
            found = tl.where(mine[:, None] & (found == found), found, float("-inf"))
            new = tl.maximum(top, found)
            base = tl.where(new == float("-inf"), 0.0, new)
            sum_of = sum_of * tl.exp(top - base) + tl.exp(found - base)
            top = new
        nothing = tl.full([BLOCK_N], float("-inf"), tl.float32)
        all_top, sum_of_all = _add(nothing, tl.zeros([BLOCK_N], tl.float32), top, sum_of, 0)
        line = (part + span) * ROWS * HEADS + lane * HEADS + head
        tl.store(tops + line, all_top, mask=lane < ROWS)
        tl.store(sums + line, sum_of_all, mask=lane < ROWS)
        at = until


@triton.jit(do_not_specialize=["candidates", "num_spans", "parts"])
def share_blocks(
    estimates, tops, sums, spans, ranges, num_rows, scores, candidates, num_spans, parts,
    HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    STREAMED: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`span_sums` and `block_shares` at once: grid (tiles of BLOCK_C candidates), each with the sums of its spans.

    Every tile adds up the sums that the parts of `stream_boxes` have left for its spans, PARTS at a time. Tiles repeat
    this work, but read from the GPU's cache and save a launch. parts, STREAMED: the parts of `stream_boxes` and the
    candidates of its tiles.
    EARLY: it starts early, like the following `rank_and_take`; the data of the step is in place before its first layer.
    """
    if EARLY:
        gdc_launch_dependents()
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < candidates
    span = tl.load(spans + c, mask=inside, other=0)
    rows = tl.load(num_rows + span, mask=inside, other=0)
    seen = inside & (rows > 0)
    s = tl.arange(0, BLOCK_S)
    tiles, _, each = _tiles(ranges, s, num_spans, parts, STREAMED)
    each = tl.maximum(each, 1)
    mass = tl.zeros([BLOCK_C], tl.float32)
    broken = tl.zeros([BLOCK_C], tl.int32)
    nobody = 1 << 40
    at = tl.min(tl.where(seen, span, nobody), 0)
    if EARLY:
        gdc_wait()
    while at < nobody:
        first_tile = tl.sum(tl.where(s < at, tiles, 0), 0)
        last_tile = first_tile + tl.sum(tl.where(s == at, tiles, 0), 0) - 1
        lines = tl.load(num_rows + at).to(tl.int32) * HEADS
        for first in range(0, lines, BLOCK_L):
            line = first + tl.arange(0, BLOCK_L)
            mask = (seen & (span == at))[None, :] & (line < lines)[:, None]
            places = estimates + line.to(tl.int64)[:, None] * candidates + c[None, :]
            # asked for before the sums, on which it does not depend
            estimate = tl.load(places, mask=mask, other=float("-inf"))
            top = tl.full([BLOCK_L], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_L], tl.float32)
            for part in range(first_tile // each, last_tile // each + 1, PARTS):
                o = part + tl.arange(0, PARTS)
                there = (o <= last_tile // each)[None, :] & (line < lines)[:, None]
                sum_places = (o + at)[None, :] * (ROWS * HEADS) + line[:, None]
                found = tl.load(tops + sum_places, mask=there, other=float("-inf"))
                top, total = _add(top, total, found, tl.load(sums + sum_places, mask=there, other=0.0), 1)
            top = tl.where(top == float("-inf"), 0.0, top)
            total = tl.where(total == 0.0, 1.0, total)
            broken = tl.maximum(broken, tl.max(tl.where(estimate == estimate, 0, 1), 0))
            estimate = tl.where(estimate == estimate, estimate, float("-inf"))
            mass += tl.sum(tl.exp(estimate - top[:, None]) / total[:, None], 0)
        at = tl.min(tl.where(seen & (span > at), span, nobody), 0)
    rows = tl.maximum(rows, 1)
    tl.store(scores + c, tl.where(broken > 0, 1.0, mass / (rows * HEADS).to(tl.float32)), mask=inside)
