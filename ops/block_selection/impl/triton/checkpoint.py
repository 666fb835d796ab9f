"""Whether a span keeps its stored choice, and which choice holds from now on."""

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
