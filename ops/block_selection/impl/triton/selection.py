"""Block selection in Triton: the scores of candidates, the ranking of blocks, and whether a span keeps its ranking."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["most", "width"])
def keep_or_replace_spans(
    stored,
    fresh,
    counts,
    modes,
    thresholds,
    chosen,
    kept,
    replaced,
    most,
    width,
    REUSE: tl.constexpr,
    CHECK: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """One span per program. stored, fresh, chosen: int64 [spans, most]; counts, modes, thresholds: int64 [spans];
    kept, replaced: int32 [spans]. BLOCK >= most."""
    span = tl.program_id(0).to(tl.int64)
    count, mode = tl.load(counts + span), tl.load(modes + span)
    n = tl.arange(0, BLOCK)
    line = span * most
    old = tl.load(stored + line + n, mask=n < most, other=-1)
    new = tl.load(fresh + line + n, mask=n < most, other=-1)
    old_there = (n < count) & (old >= 0) & (old < width)
    new_there = (n < count) & (new >= 0) & (new < width)
    # an entry counts where it is the first of its kind and the other ranking has none
    old_matched, new_matched = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for begin in range(0, most, COMPARED):
        m = begin + tl.arange(0, COMPARED)
        inside = (m < most) & (m < count)
        other_old = tl.load(stored + line + m, mask=inside, other=-1)[None, :]
        other_new = tl.load(fresh + line + m, mask=inside, other=-1)[None, :]
        earlier = m[None, :] < n[:, None]
        same = (old[:, None] == other_new) | ((old[:, None] == other_old) & earlier)
        old_matched = tl.maximum(old_matched, tl.max(tl.where(same, 1, 0), 1))
        same = (new[:, None] == other_old) | ((new[:, None] == other_new) & earlier)
        new_matched = tl.maximum(new_matched, tl.max(tl.where(same, 1, 0), 1))
    apart = tl.sum(tl.where(old_there & (old_matched == 0), 1, 0), 0)
    apart += tl.sum(tl.where(new_there & (new_matched == 0), 1, 0), 0)
    enough = tl.sum(tl.where(old_there, 1, 0), 0) >= count
    check = mode == CHECK
    keeps = check & (apart <= tl.load(thresholds + span)) & enough
    tl.store(kept + span, keeps.to(tl.int32))
    tl.store(replaced + span, (check & (keeps == 0)).to(tl.int32))
    tl.store(chosen + line + n, tl.where(keeps | (mode == REUSE), old, new), mask=n < most)


@triton.jit(do_not_specialize=["candidates", "end"])
def place_scores(scores, places, keys, candidates, end, BLOCK_C: tl.constexpr):
    """keys: int32 [end]: the larger the score, the larger; NaN the largest; the smallest number without a candidate."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    place = tl.load(places + c, mask=c < candidates, other=end)
    score = tl.load(scores + c, mask=c < candidates, other=0.0).to(tl.float32)
    # the lowest finite number, so that a candidate is above what is none; and 0 in place of -0
    score = tl.where(score < -3.4028234663852886e38, -3.4028234663852886e38, score) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 2147483647, bits)
    key = tl.where(score == score, key, 2147483647)
    tl.store(keys + place, key, mask=(place < end) & (c < candidates))


@triton.jit(do_not_specialize=["width", "most"])
def rank_blocks(keys, ranking, width, most, BLOCK_W: tl.constexpr, COMPARED: tl.constexpr):
    """Grid (spans, tiles of BLOCK_W blocks). keys: int32 [spans, width]; ranking: int64 [spans, most]: the
    first `width` entries of each span are written."""
    span = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    nobody = -2147483648
    mine = tl.load(keys + span * width + block, mask=block < width, other=nobody)
    before = tl.zeros([BLOCK_W], tl.int32)
    for first in range(0, width, COMPARED):
        other = first + tl.arange(0, COMPARED)
        theirs = tl.load(keys + span * width + other, mask=other < width, other=nobody)
        better = (theirs[None, :] > mine[:, None]) | (
            (theirs[None, :] == mine[:, None]) & (other[None, :] < block[:, None])
        )
        before += tl.sum(tl.where(better & (other < width)[None, :], 1, 0), 1)
    chosen = tl.where(mine == nobody, -1, block).to(tl.int64)
    tl.store(ranking + span * most + before, chosen, mask=(block < width) & (before < most))


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
    """Grid (tiles of BLOCK_C candidates, kv heads). Arguments as of `block_scores`.

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


@triton.jit(do_not_specialize=["candidates", "lines"])
def span_sums(
    estimates,
    spans,
    tops,
    sums,
    candidates,
    lines,
    LOOKED_AT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (tiles of BLOCK_L lines, spans). estimates: fp32 [lines, candidates], a line is a row and a head.

    Lines are on the first axis because CUDA allows at most 65,535 on the other, fewer than rows x heads of a prompt.
    tops, sums: fp32 [spans, lines] of the softmax over the candidates of a span (mostly neighbours), without NaN.
    """
    span = tl.program_id(1)
    line = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    begin, end = candidates, 0
    for first in range(0, candidates, LOOKED_AT):
        c = first + tl.arange(0, LOOKED_AT)
        mine = tl.load(spans + c, mask=c < candidates, other=-1) == span
        begin = tl.minimum(begin, tl.min(tl.where(mine, c, candidates), 0))
        end = tl.maximum(end, tl.max(tl.where(mine, c + 1, 0), 0))
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
    mass = tl.zeros([BLOCK_C], tl.float32)
    broken = tl.zeros([BLOCK_C], tl.int32)
    for first in range(0, lines, BLOCK_L):
        line = first + tl.arange(0, BLOCK_L)
        mask = inside[None, :] & (line < lines)[:, None]
        places = line.to(tl.int64)[:, None] * candidates + c[None, :]
        found = tl.load(estimates + places, mask=mask, other=float("-inf"))
        place = span[None, :] * lines + line[:, None]
        top = tl.load(tops + place, mask=mask, other=0.0)
        total = tl.load(sums + place, mask=mask, other=1.0)
        broken = tl.maximum(broken, tl.max(tl.where(found == found, 0, 1), 0))
        mass += tl.sum(tl.exp(tl.where(found == found, found, float("-inf")) - top) / total, 0)
    rows = tl.maximum(tl.load(num_rows + span, mask=inside, other=1), 1)
    tl.store(scores + c, tl.where(broken > 0, 1.0, mass / (rows * HEADS).to(tl.float32)), mask=inside)
