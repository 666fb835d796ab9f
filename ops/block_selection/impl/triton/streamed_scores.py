"""Scores of few rows in two launches: estimates by programs that stream summaries, then sums and shares at once."""

import triton
import triton.language as tl


@triton.jit
def _log_mean(of_boxes, v, log_rest, log_all, VECTORS: tl.constexpr):
    """fp32 [candidates, lines] of products [candidates, boxes, lines]; what is not finite is NaN."""
    if VECTORS > 1:
        of_boxes = tl.where((v == 0)[None, :, None], of_boxes + log_rest, of_boxes)
    of_boxes = tl.where((v < VECTORS)[None, :, None], of_boxes, float("-inf"))
    # what is no number is not among the largest, and comes back with the sum
    top = tl.max(of_boxes, 1)
    base = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    found = base + tl.log(tl.sum(tl.exp(of_boxes - base[:, None, :]), 1))
    if VECTORS > 1:
        found -= log_all
    return tl.where(tl.abs(found) < float("inf"), found, float("nan"))


@triton.jit(do_not_specialize=["candidates", "num_spans"])
def stream_boxes(
    query, summaries, blocks, spans, ranges, first_rows, num_rows, estimates, scale, log_rest, log_all,
    candidates, num_spans, q_row, q_head, s_block, s_vector, s_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VECTORS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `estimate_boxes`, where BLOCK_N lines hold all ROWS rows of a span: grid (programs x KV heads).

    Each program has an even share of the tiles of all spans, whatever span they belong to, and copies the summaries of
    the next tiles while it multiplies one. The query of a span stays in registers for all tiles of the span.

    ranges: int32 [spans, 2], see `find_candidates`. BLOCK_S >= num_spans.
    """
    kv_heads: tl.constexpr = HEADS // GROUP
    kv_head, part, parts = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads, tl.num_programs(0) // kv_heads
    s = tl.arange(0, BLOCK_S)
    begins = tl.load(ranges + 2 * s, mask=s < num_spans, other=0)
    tiles = tl.cdiv(tl.load(ranges + 2 * s + 1, mask=s < num_spans, other=0) - begins, BLOCK_C)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    each = tl.cdiv(total, parts)
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
        for tile in tl.range(at - before, until - before, num_stages=STAGES):
            c = begin + tile * BLOCK_C + tl.arange(0, BLOCK_C)
            own = begin + tile * BLOCK_C + m // BLOCK_V
            block = tl.load(blocks + own, mask=own < end, other=0)
            read = (block != 0) & (m % BLOCK_V < VECTORS)
            place = block * s_block + (m % BLOCK_V) * s_vector
            mask = read[:, None] if DIM == BLOCK_D else read[:, None] & (d < DIM)[None, :]
            boxes = tl.load(source + place[:, None] + d[None, :], mask=mask, other=0.0).to(COMPUTE)
            products = tl.dot(boxes, q, input_precision=PRECISION) * scale
            found = _log_mean(tl.reshape(products, [BLOCK_C, BLOCK_V, BLOCK_N]), v, log_rest, log_all, VECTORS)
            found = tl.where(real[None, :], found, float("-inf"))
            # between the first and the last candidate of a span others may stand, and pads
            mine = tl.load(spans + c, mask=c < end, other=-1) == span
            mine = mine & (tl.load(blocks + c, mask=c < end, other=0) != 0)
            target = estimates + (lane * HEADS + head).to(tl.int64)[None, :] * candidates + c[:, None]
            tl.store(target, found, mask=mine[:, None] & (lane < ROWS)[None, :])
        at = until


@triton.jit(do_not_specialize=["candidates"])
def share_blocks(
    estimates, spans, ranges, num_rows, scores, candidates,
    HEADS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """`span_sums` and `block_shares` at once: grid (tiles of BLOCK_C candidates), each with the sums of its spans.

    A tile repeats what its neighbours add up, from the GPU's cache: little for few rows, and a launch less.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < candidates
    span = tl.load(spans + c, mask=inside, other=0)
    rows = tl.load(num_rows + span, mask=inside, other=0)
    seen = inside & (rows > 0)
    mass = tl.zeros([BLOCK_C], tl.float32)
    broken = tl.zeros([BLOCK_C], tl.int32)
    nobody = 1 << 40
    at = tl.min(tl.where(seen, span, nobody), 0)
    while at < nobody:
        begin, end = tl.load(ranges + 2 * at), tl.load(ranges + 2 * at + 1)
        lines = tl.load(num_rows + at).to(tl.int32) * HEADS
        for first in range(0, lines, BLOCK_L):
            line = first + tl.arange(0, BLOCK_L)
            places = estimates + line.to(tl.int64)[:, None] * candidates
            top = tl.full([BLOCK_L], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_L], tl.float32)
            for neighbour in range(begin, end, NEIGHBOURS):
                o = neighbour + tl.arange(0, NEIGHBOURS)
                same = tl.load(spans + o, mask=o < end, other=-1) == at
                found = tl.load(places + o[None, :], mask=same[None, :] & (line < lines)[:, None], other=float("-inf"))
                found = tl.where(found == found, found, float("-inf"))
                new_top = tl.maximum(top, tl.max(found, 1))
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                total = total * tl.exp(top - base) + tl.sum(tl.exp(found - base[:, None]), 1)
                top = new_top
            top = tl.where(top == float("-inf"), 0.0, top)
            total = tl.where(total == 0.0, 1.0, total)
            mask = (seen & (span == at))[None, :] & (line < lines)[:, None]
            found = tl.load(places + c[None, :], mask=mask, other=float("-inf"))
            broken = tl.maximum(broken, tl.max(tl.where(found == found, 0, 1), 0))
            found = tl.where(found == found, found, float("-inf"))
            mass += tl.sum(tl.exp(found - top[:, None]) / total[:, None], 0)
        at = tl.min(tl.where(seen & (span > at), span, nobody), 0)
    rows = tl.maximum(rows, 1)
    tl.store(scores + c, tl.where(broken > 0, 1.0, mass / (rows * HEADS).to(tl.float32)), mask=inside)
