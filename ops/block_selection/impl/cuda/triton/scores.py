"""The scores of candidates in Triton: estimates by their summaries, and a softmax over each request's blocks."""

import triton
import triton.language as tl


@triton.jit
def _load_vector(summaries, block, index, kv_head, inside, s_block, s_vector, s_head, DIM, BLOCK_D: tl.constexpr):
    """fp32 [candidates, 1, dim]: a vector of each block's summary."""
    d = tl.arange(0, BLOCK_D)
    places = summaries + block * s_block + index * s_vector + kv_head * s_head
    mask = inside[:, None, None] & (d < DIM)[None, None, :]
    return tl.load(places[:, None, None] + d[None, None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _log_add(one, other):
    """log(exp(one) + exp(other)); NaN stays NaN."""
    high = tl.maximum(one, other)
    base = tl.where(tl.abs(high) < float("inf"), high, 0.0)
    return base + tl.log(tl.exp(one - base) + tl.exp(other - base))


@triton.jit(do_not_specialize=["candidates", "max_rows"])
def estimate_blocks(
    query,
    summaries,
    blocks,
    spans,
    first_rows,
    num_rows,
    estimates,
    scale,
    log_rest,
    log_all,
    candidates,
    max_rows,
    q_row,
    q_head,
    s_block,
    s_vector,
    s_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTORS: tl.constexpr,
    MINMAX: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (tiles of BLOCK_C candidates, kv heads). Arguments are as in `block_scores`.

    estimates: fp32 [max_rows, HEADS, candidates]: -inf for rows that the span lacks, NaN for values that are not
        finite. log_rest, log_all: logarithms of the numbers of keys that the first box and all boxes stand for.
    """
    kv_head = tl.program_id(1)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < candidates
    block = tl.load(blocks + c, mask=inside, other=0)
    span = tl.load(spans + c, mask=inside, other=0)
    first, count = tl.load(first_rows + span), tl.load(num_rows + span)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    for row in range(max_rows):
        seen = inside & (row < count)
        places = query + (first + row)[:, None, None] * q_row + head[None, :, None] * q_head + d[None, None, :]
        mask = seen[:, None, None] & (g < GROUP)[None, :, None] & (d < DIM)[None, None, :]
        q = tl.load(places, mask=mask, other=0.0).to(tl.float32) * scale
        vector = _load_vector(summaries, block, 0, kv_head, seen, s_block, s_vector, s_head, DIM, BLOCK_D)
        if MINMAX:
            high = _load_vector(summaries, block, 1, kv_head, seen, s_block, s_vector, s_head, DIM, BLOCK_D)
            vector = tl.where(q < 0, FAR * vector + NEAR * high, NEAR * vector + FAR * high)
        found = tl.sum(q * vector, 2)
        if VECTORS > 1:
            found += log_rest
            for index in range(1, VECTORS):
                box = _load_vector(summaries, block, index, kv_head, seen, s_block, s_vector, s_head, DIM, BLOCK_D)
                found = _log_add(found, tl.sum(q * box, 2))
            found -= log_all
        found = tl.where(tl.abs(found) < float("inf"), found, float("nan"))
        found = tl.where(seen[:, None], found, float("-inf"))
        target = estimates + (row * HEADS + head).to(tl.int64)[None, :] * candidates + c[:, None]
        tl.store(target, found, mask=inside[:, None] & (g < GROUP)[None, :])


@triton.jit(do_not_specialize=["candidates", "max_rows"])
def estimate_boxes(
    query,
    summaries,
    blocks,
    spans,
    first_rows,
    num_rows,
    estimates,
    scale,
    log_rest,
    log_all,
    candidates,
    max_rows,
    q_row,
    q_head,
    s_block,
    s_vector,
    s_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Like `estimate_blocks` for boxes, in matrix products: grid (tiles of BLOCK_C candidates x KV heads).

    Pads are not written. A program reads the summaries of its candidates once, and multiplies them with the query heads
    of its KV head, as many rows at a time as fit in BLOCK_N, span by span: most tiles belong to one span.
    """
    kv_heads: tl.constexpr = HEADS // GROUP
    lanes: tl.constexpr = BLOCK_N // GROUP
    # programs of a tile, which read pieces of the same memory, run side by side
    kv_head = tl.program_id(0) % kv_heads
    tile = (tl.program_id(0) // kv_heads) * BLOCK_C
    m, v, d = tl.arange(0, BLOCK_C * BLOCK_V), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_D)
    own = tile + m // BLOCK_V
    # a pad is block 0: loading the rows of its span would be one more load that the summaries wait for
    block = tl.load(blocks + own, mask=own < candidates, other=0)
    read = (block != 0) & (m % BLOCK_V < VECTORS)
    place = block * s_block + (m % BLOCK_V) * s_vector + kv_head * s_head
    boxes = tl.load(summaries + place[:, None] + d[None, :], mask=read[:, None] & (d < DIM)[None, :], other=0.0).to(
        COMPUTE
    )
    c = tile + tl.arange(0, BLOCK_C)
    inside = c < candidates
    span = tl.load(spans + c, mask=inside, other=0)
    n = tl.arange(0, BLOCK_N)
    lane, head = n // GROUP, kv_head * GROUP + n % GROUP
    nobody = 1 << 40
    inside = inside & (tl.load(blocks + c, mask=inside, other=0) != 0)
    at = tl.min(tl.where(inside, span, nobody), 0)
    while at < nobody:
        first, count = tl.load(first_rows + at), tl.load(num_rows + at)
        for begin in range(0, max_rows, lanes):
            row = begin + lane
            real = (lane < lanes) & (row < count)
            q = tl.load(
                query + (first + row)[:, None] * q_row + head[:, None] * q_head + d[None, :],
                mask=real[:, None] & (d < DIM)[None, :],
                other=0.0,
            ).to(COMPUTE)
            products = tl.dot(boxes, tl.trans(q), input_precision=PRECISION) * scale
            of_boxes = tl.reshape(products, [BLOCK_C, BLOCK_V, BLOCK_N])
            if VECTORS > 1:
                of_boxes = tl.where((v == 0)[None, :, None], of_boxes + log_rest, of_boxes)
            of_boxes = tl.where((v < VECTORS)[None, :, None], of_boxes, float("-inf"))
            # a NaN is not among the largest, and comes back with the sum
            top = tl.max(of_boxes, 1)
            base = tl.where(tl.abs(top) < float("inf"), top, 0.0)
            found = base + tl.log(tl.sum(tl.exp(of_boxes - base[:, None, :]), 1))
            if VECTORS > 1:
                found -= log_all
            found = tl.where(tl.abs(found) < float("inf"), found, float("nan"))
            found = tl.where(real[None, :], found, float("-inf"))
            target = estimates + (row * HEADS + head).to(tl.int64)[None, :] * candidates + c[:, None]
            mine = inside & (span == at)
            tl.store(target, found, mask=mine[:, None] & ((lane < lanes) & (row < max_rows))[None, :])
        at = tl.min(tl.where(inside & (span > at), span, nobody), 0)


@triton.jit(do_not_specialize=["candidates"])
def find_candidates(spans, num_rows, ranges, candidates, COUNTED: tl.constexpr, BLOCK_C: tl.constexpr):
    """One span per program. ranges: int32 [spans, 2]: its first candidate, and one behind its last, mostly neighbours;
    an empty range if it has none. COUNTED: so it is for spans without rows, by `num_rows`."""
    span = tl.program_id(0)
    begin, end = candidates, 0
    looked_at = candidates
    if COUNTED:
        looked_at = tl.where(tl.load(num_rows + span) > 0, candidates, 0)
    for first in range(0, looked_at, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        mine = tl.load(spans + c, mask=c < candidates, other=-1) == span
        begin = tl.minimum(begin, tl.min(tl.where(mine, c, candidates), 0))
        end = tl.maximum(end, tl.max(tl.where(mine, c + 1, 0), 0))
    tl.store(ranges + 2 * span, tl.minimum(begin, end))
    tl.store(ranges + 2 * span + 1, end)


@triton.jit(do_not_specialize=["candidates", "lines"])
def span_sums(
    estimates,
    spans,
    ranges,
    tops,
    sums,
    candidates,
    lines,
    BLOCK_L: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (tiles of BLOCK_L lines, spans). estimates: fp32 [lines, candidates], a line is a row and a head.

    Lines are on the first axis because CUDA allows at most 65,535 on the other, fewer than rows x heads of a prompt.
    tops, sums: fp32 [spans, lines] of the softmax over the candidates of a span, without NaN. ranges: int32 [spans, 2].
    """
    span = tl.program_id(1)
    line = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    begin, end = tl.load(ranges + 2 * span), tl.load(ranges + 2 * span + 1)
    top = tl.full([BLOCK_L], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_L], tl.float32)
    for first in range(begin, end, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        mine = tl.load(spans + c, mask=c < end, other=-1) == span
        places = estimates + line.to(tl.int64)[:, None] * candidates + c[None, :]
        found = tl.load(places, mask=mine[None, :] & (line < lines)[:, None], other=float("-inf"))
        found = tl.where(found == found, found, float("-inf"))
        new_top = tl.maximum(top, tl.max(found, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(found - base[:, None]), 1)
        top = new_top
    place = span * lines + line
    tl.store(tops + place, tl.where(top == float("-inf"), 0.0, top), mask=line < lines)
    tl.store(sums + place, tl.where(total == 0.0, 1.0, total), mask=line < lines)


@triton.jit(do_not_specialize=["candidates", "lines"])
def block_shares(
    estimates, spans, num_rows, tops, sums, scores, candidates, lines,
    HEADS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_C candidates. scores: fp32 [candidates], the mean share of the span's rows and heads."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < candidates
    span = tl.load(spans + c, mask=inside, other=0)
    rows = tl.load(num_rows + span, mask=inside, other=0)
    seen = inside & (rows > 0)
    mass = tl.zeros([BLOCK_C], tl.float32)
    broken = tl.zeros([BLOCK_C], tl.int32)
    for first in range(0, lines, BLOCK_L):
        line = first + tl.arange(0, BLOCK_L)
        mask = seen[None, :] & (line < lines)[:, None]
        places = line.to(tl.int64)[:, None] * candidates + c[None, :]
        found = tl.load(estimates + places, mask=mask, other=float("-inf"))
        place = span[None, :] * lines + line[:, None]
        top = tl.load(tops + place, mask=mask, other=0.0)
        total = tl.load(sums + place, mask=mask, other=1.0)
        broken = tl.maximum(broken, tl.max(tl.where(found == found, 0, 1), 0))
        mass += tl.sum(tl.exp(tl.where(found == found, found, float("-inf")) - top) / total, 0)
    rows = tl.maximum(rows, 1)
    tl.store(scores + c, tl.where(broken > 0, 1.0, mass / (rows * HEADS).to(tl.float32)), mask=inside)
