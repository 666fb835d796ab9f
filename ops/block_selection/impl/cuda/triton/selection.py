"""The choice of blocks in Triton: their ranking, whether a span keeps the one before, and what attention reads."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def _apart(
    stored, fresh, old, new, old_there, new_there, n, count, most,
    BLOCK: tl.constexpr, COMPARED: tl.constexpr, FROM: tl.constexpr,
):  # fmt: skip
    """Counts the entries of two rankings that the other one lacks. stored, fresh: their places; old, new: their
    entries.

    FROM: the cache that fresh entries are read through, ".cg" where other programs of the launch wrote them.
    """
    # an entry counts if it is the first of its kind and the other ranking does not have it
    old_matched, new_matched = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for begin in range(0, most, COMPARED):
        m = begin + tl.arange(0, COMPARED)
        inside = (m < most) & (m < count)
        other_old = tl.load(stored + m, mask=inside, other=-1)[None, :]
        other_new = tl.load(fresh + m, mask=inside, other=-1, cache_modifier=FROM)[None, :]
        earlier = m[None, :] < n[:, None]
        same = (old[:, None] == other_new) | ((old[:, None] == other_old) & earlier)
        old_matched = tl.maximum(old_matched, tl.max(tl.where(same, 1, 0), 1))
        same = (new[:, None] == other_old) | ((new[:, None] == other_new) & earlier)
        new_matched = tl.maximum(new_matched, tl.max(tl.where(same, 1, 0), 1))
    apart = tl.sum(tl.where(old_there & (old_matched == 0), 1, 0), 0)
    return apart + tl.sum(tl.where(new_there & (new_matched == 0), 1, 0), 0)


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
    apart = _apart(stored + line, fresh + line, old, new, old_there, new_there, n, count, most, BLOCK, COMPARED, "")
    enough = tl.sum(tl.where(old_there, 1, 0), 0) >= count
    check = mode == CHECK
    keeps = check & (apart <= tl.load(thresholds + span)) & enough
    tl.store(kept + span, keeps.to(tl.int32))
    tl.store(replaced + span, (check & (keeps == 0)).to(tl.int32))
    tl.store(chosen + line + n, tl.where(keeps | (mode == REUSE), old, new), mask=n < most)


@triton.jit
def _order(scores, places, c, inside, first_place, width):
    """Returns int64 [candidates], larger is better: by score, NaN the largest, then by block number, the lowest first;
    the smallest number for entries that are not candidates of the span with these places. Also returns the block
    numbers, int32.
    """
    score = tl.load(scores + c, mask=inside, other=0.0).to(tl.float32)
    number = tl.load(places + c, mask=inside, other=-1) - first_place
    # the lowest finite number, as in the reference; and 0 instead of -0
    score = tl.where(score < -3.4028234663852886e38, -3.4028234663852886e38, score) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 2147483647, bits)
    key = tl.where(score == score, key, 2147483647)
    real = inside & (number >= 0) & (number < width)
    order = (key.to(tl.int64) << 32) + (2147483647 - number)
    return tl.where(real, order, -9223372036854775808), number, real


@triton.jit
def _rank(
    scores, places, begin, end, ranking, span, tile, width, most, BLOCK_C: tl.constexpr, COMPARED: tl.constexpr
):  # fmt: skip
    """Writes a tile's part of a span's ranking, int64 [most]: its candidates that are among the best. The first tile,
    which exists even without a candidate, fills the rest.

    begin, end: the candidates of the span.
    """
    c = begin + tile * BLOCK_C + tl.arange(0, BLOCK_C)
    mine, number, real = _order(scores, places, c, c < end, span * width, width)
    # threads add up for themselves, and with each other once
    better, counted = tl.zeros([BLOCK_C, COMPARED], tl.int32), tl.zeros([COMPARED], tl.int32)
    for first in range(begin, end, COMPARED):
        other = first + tl.arange(0, COMPARED)
        theirs, _, theirs_real = _order(scores, places, other, other < end, span * width, width)
        counted += theirs_real.to(tl.int32)
        better += (theirs[None, :] > mine[:, None]).to(tl.int32)
    before = tl.sum(better, 1)
    tl.store(ranking + before, number, mask=real & (before < most))
    if tile == 0:
        # ranks that no candidate has
        count = tl.sum(counted, 0)
        for first in range(count, most, COMPARED):
            rank = first + tl.arange(0, COMPARED)
            tl.store(ranking + rank, tl.full([COMPARED], -1, tl.int64), mask=rank < most)


@triton.jit(do_not_specialize=["width", "most"])
def rank_candidates(
    scores, places, ranges, ranking, width, most, BLOCK_C: tl.constexpr, COMPARED: tl.constexpr
):  # fmt: skip
    """Grid (spans, programs of a span); arguments as in  `choose_blocks`. ranges: int32 [spans, 2], see
    `find_candidates`. ranking: int64 [spans, most].
    """
    span = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(ranges + 2 * span), tl.load(ranges + 2 * span + 1)
    for tile in range(tl.program_id(1), tl.maximum(tl.cdiv(end - begin, BLOCK_C), 1), tl.num_programs(1)):
        _rank(scores, places, begin, end, ranking + span * most, span, tile, width, most, BLOCK_C, COMPARED)


@triton.jit
def _first_id(counts, span, SPANS: tl.constexpr):
    """Returns int64, the start of the span's blocks among the blocks of all spans. counts: int64 [spans]; SPANS of them
    at a time.
    """
    begin = tl.zeros([], tl.int64)
    for first in range(0, span, SPANS):
        before = first + tl.arange(0, SPANS)
        begin += tl.sum(tl.load(counts + before, mask=before < span, other=0), 0)
    return begin


@triton.jit
def _take(
    fresh, mine, count, mode, thresholds, begin, block_table, chosen, ids, listed, list_places, checks,
    span, spans, most, width, selected,
    REUSE: tl.constexpr, CHECK: tl.constexpr, BLOCK: tl.constexpr, COMPARED: tl.constexpr, FROM: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Decides what a span attends to from now on. fresh: its new ranking, int64 [most]. FROM: see `_apart`.

    mine: the stored ranking. begin: see `_first_id`. LISTED: `ids` are also written to `listed`, int64 [entries], at
    `list_places`, int64 [selected].
    """
    n = tl.arange(0, BLOCK)
    inside = (n < count) & (begin + n < selected)
    # asked for together
    list_at = n
    if LISTED:
        list_at = tl.load(list_places + begin + n, mask=inside, other=0)
    old = tl.load(mine + n, mask=n < most, other=-1)
    ranking = old
    if mode != REUSE:
        ranking = tl.load(fresh + n, mask=n < most, other=-1, cache_modifier=FROM)
    if mode == CHECK:
        new = ranking
        old_there = (n < count) & (old >= 0) & (old < width)
        new_there = (n < count) & (new >= 0) & (new < width)
        apart = _apart(mine, fresh, old, new, old_there, new_there, n, count, most, BLOCK, COMPARED, FROM)
        enough = tl.sum(tl.where(old_there, 1, 0), 0) >= count
        keeps = (apart <= tl.load(thresholds + span)) & enough
        tl.atomic_add(checks + tl.where(keeps, 0, 1), tl.full([], 1, tl.int64))
        ranking = tl.where(keeps, old, new)
        # other threads have read what is written below
        tl.debug_barrier()
    block = tl.load(block_table + span * width + tl.maximum(ranking, 0), mask=n < count, other=0)
    if LISTED:
        tl.store(listed + list_at, block, mask=inside)
    tl.store(ids + begin + n, block, mask=inside)
    tl.store(mine + n, ranking, mask=n < most)
    tl.store(chosen + span * most + n, ranking, mask=n < most)
    if span == spans - 1:
        nothing = tl.zeros([BLOCK], tl.int64)
        for first in range(begin + count, selected, BLOCK):
            tl.store(ids + first + n, nothing, mask=first + n < selected)
            if LISTED:
                pad = tl.load(list_places + first + n, mask=first + n < selected, other=0)
                tl.store(listed + pad, nothing, mask=first + n < selected)


@triton.jit(do_not_specialize=["most", "width", "selected"])
def take_choices(
    fresh, stored, slots, counts, modes, thresholds, block_table, chosen, ids, checks, most, width, selected,
    REUSE: tl.constexpr, CHECK: tl.constexpr, BLOCK: tl.constexpr, COMPARED: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """One span per program; arguments as in  `take_choice`. chosen: int64 [spans, most]; ids: int64 [selected].

    BLOCK >= most. SPANS: spans that are added up at once.
    """
    span = tl.program_id(0).to(tl.int64)
    count, mode = tl.load(counts + span), tl.load(modes + span)
    mine = stored + tl.load(slots + span) * most
    _take(
        fresh + span * most, mine, count, mode, thresholds, _first_id(counts, span, SPANS), block_table, chosen,
        ids, None, None, checks, span, tl.num_programs(0), most, width, selected, REUSE, CHECK, BLOCK, COMPARED, "",
        False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_spans", "width", "most", "selected"])
def rank_and_take(
    scores, places, ranges, tickets, fresh, stored, slots, counts, modes, thresholds, block_table, chosen, ids,
    listed, list_places, checks, num_spans, most, width, selected,
    BLOCK_C: tl.constexpr, RANKED_BY: tl.constexpr, REUSE: tl.constexpr, CHECK: tl.constexpr, BLOCK: tl.constexpr,
    COMPARED: tl.constexpr, BLOCK_S: tl.constexpr, LISTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`rank_candidates` and `take_choices` in one launch: programs share the tiles of candidates of all spans.

    The program that ranks the last tile of a span takes its choice. A span that reuses its choice is one tile without
    ranking.
    fresh: int64 [spans, most] between them. tickets: int32 [spans], 0 before and after. RANKED_BY: candidates that are
    compared at once while ranking. BLOCK_S >= num_spans.
    EARLY: it starts early; the data of the step is in place before its first layer.
    """
    s = tl.arange(0, BLOCK_S)
    there = s < num_spans
    all_counts = tl.load(counts + s, mask=there, other=0)
    reused = tl.load(modes + s, mask=there, other=REUSE) == REUSE
    sizes = tl.load(ranges + 2 * s + 1, mask=there, other=0) - tl.load(ranges + 2 * s, mask=there, other=0)
    tiles = tl.where(there, tl.where(reused, 1, tl.maximum(tl.cdiv(sizes, BLOCK_C), 1)), 0)
    ends = tl.cumsum(tiles, 0)
    if EARLY:
        gdc_wait()
    for at in range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0)):
        span = tl.sum((ends <= at).to(tl.int32), 0).to(tl.int64)
        mode = tl.load(modes + span)
        takes = mode == REUSE
        if mode != REUSE:
            tile = at - tl.sum(tl.where(s < span, tiles, 0), 0)
            begin, end = tl.load(ranges + 2 * span), tl.load(ranges + 2 * span + 1)
            _rank(scores, places, begin, end, fresh + span * most, span, tile, width, most, BLOCK_C, RANKED_BY)
            # One thread adds for the program. The barrier orders the stores of the others before it, so adding releases
            # all of them to the GPU; reading the last ticket acquires what other programs released.
            tl.debug_barrier()
            last = tl.sum(tl.where(s == span, tiles, 0), 0) - 1
            takes = tl.atomic_add(tickets + span, 1, sem="acq_rel", scope="gpu") == last
            if takes:
                # no other program will come: ready for the next layer, and for the next replay of the graph
                tl.store(tickets + span, 0)
        if takes:
            mine = stored + tl.load(slots + span) * most
            _take(
                fresh + span * most, mine, tl.load(counts + span), mode, thresholds,
                tl.sum(tl.where(s < span, all_counts, 0), 0), block_table, chosen, ids, listed, list_places, checks,
                span, num_spans, most, width, selected, REUSE, CHECK, BLOCK, COMPARED, ".cg", LISTED,
            )  # fmt: skip
