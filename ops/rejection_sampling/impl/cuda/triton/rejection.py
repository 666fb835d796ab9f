"""Rejection sampling of a row: its draft, or the token of the highest score in what the draft's distribution leaves."""

import triton
import triton.language as tl


@triton.jit
def best_of(numbers, divisor, token, mask, VOCAB: tl.constexpr):
    """Returns the highest score of a block of tokens, `numbers` divided by `divisor`, and the first token that has it.

    NaN counts as infinite. mask: which tokens there are.
    """
    score = tl.div_rn(numbers, divisor)
    score = tl.where(mask, tl.where(score == score, score, float("inf")), -float("inf"))
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, VOCAB), 0)


@triton.jit
def accept_rows(
    probabilities, drafts, draft_probabilities, uniform, noise, tokens, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """A program for each row, which reads BLOCK tokens at a time.

    probabilities, draft_probabilities, noise: float32 [rows, VOCAB]. uniform: float32 [rows]. drafts and tokens: int64
    [rows]. All are contiguous.

    Finds the token of the whole distribution, too: whether anything is left is known only at the end. Divides with the
    rounding of torch. NaN is larger than all numbers, as in torch, and the first of equal scores is taken.
    """
    row = tl.program_id(0).to(tl.int64)
    start = row * VOCAB
    draft = tl.load(drafts + row)
    place = start + tl.maximum(draft, 0)
    of_draft = tl.load(draft_probabilities + place)
    is_drawn = (draft >= 0) & (of_draft > 0)
    is_accepted = is_drawn & (tl.load(uniform + row) * of_draft < tl.load(probabilities + place))
    left = -float("inf")
    best_left = -float("inf")
    best_whole = -float("inf")
    token_left = tl.zeros((), tl.int32)
    token_whole = tl.zeros((), tl.int32)
    for first in range(0, VOCAB, BLOCK):
        token = first + tl.arange(0, BLOCK)
        mask = token < VOCAB
        whole = tl.load(probabilities + start + token, mask=mask, other=0.0)
        drawn = tl.load(draft_probabilities + start + token, mask=mask & is_drawn, other=0.0)
        divisor = tl.load(noise + start + token, mask=mask, other=1.0)
        rest = whole - drawn
        # of NaN both comparisons are false
        rest = tl.where(rest < 0, 0.0, rest)
        left = tl.maximum(left, tl.max(tl.where(mask, tl.where(rest == rest, rest, float("inf")), -float("inf")), 0))
        best, found = best_of(rest, divisor, token, mask, VOCAB)
        token_left = tl.where(best > best_left, found, token_left)
        best_left = tl.maximum(best, best_left)
        best, found = best_of(whole, divisor, token, mask, VOCAB)
        token_whole = tl.where(best > best_whole, found, token_whole)
        best_whole = tl.maximum(best, best_whole)
    chosen = tl.where(left > 0, token_left, token_whole).to(tl.int64)
    tl.store(tokens + row, tl.where(is_accepted, draft, chosen))
