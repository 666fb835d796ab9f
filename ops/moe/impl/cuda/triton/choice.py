"""The experts of a row: scores, the best of them, and their weights."""

import triton
import triton.language as tl


@triton.jit
def choose(
    logits,
    bias,
    weights,
    ids,
    row_size,
    scale,
    EXPERTS: tl.constexpr,
    SPREAD: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    TINY: tl.constexpr,
):
    """A program for each row. logits: [rows, EXPERTS]. bias: [EXPERTS] or None. weights: float32, and ids, both
    [rows, CHOSEN]. SPREAD: EXPERTS, up to a power of two.

    NaN is larger than all numbers, as in torch: a row with a NaN gets NaN weights. The first of equal scores is taken.
    """
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, SPREAD)
    is_left = number < EXPERTS
    logit = tl.load(logits + row * row_size + number, mask=is_left, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        powers = tl.exp(logit - tl.max(logit, 0))
        score = powers / tl.sum(powers, 0)
    rank = score
    if bias is not None:
        rank += tl.load(bias + number, mask=is_left, other=0.0).to(tl.float32)
    rank = tl.where(rank == rank, rank, float("inf"))
    place = tl.arange(0, SPREAD)
    found = tl.zeros((SPREAD,), tl.float32)
    which = tl.zeros((SPREAD,), tl.int32)
    for turn in tl.static_range(CHOSEN):
        best = tl.max(tl.where(is_left, rank, -float("inf")), 0)
        taken = tl.min(tl.where(is_left & (rank == best), number, SPREAD), 0)
        share = tl.sum(tl.where(number == taken, score, 0.0), 0)
        found = tl.where(place == turn, share, found)
        which = tl.where(place == turn, taken, which)
        is_left = is_left & (number != taken)
    if RENORMALISE:
        found = found / (tl.sum(found, 0) + TINY)
    kept = place < CHOSEN
    tl.store(weights + row * CHOSEN + place, found * scale, mask=kept)
    tl.store(ids + row * CHOSEN + place, which.to(ids.dtype.element_ty), mask=kept)
