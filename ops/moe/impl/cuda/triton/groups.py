"""Pairs of row and expert, grouped by expert: in the order of their numbers, and within one in the order of rows."""

import triton
import triton.language as tl


@triton.jit
def group_pairs(ids, order, starts, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each expert, which reads all pairs twice: no program waits for another, and there are no atomic
        additions.

    ids: [pairs]; numbers outside of 0 to EXPERTS - 1 are in no group. order: int32 [pairs], the pairs of expert 0, of
    expert 1, and so on. starts: int32 [EXPERTS + 1], where each group begins.
    """
    expert = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        number = tl.load(ids + pair, mask=pair < pairs, other=-1)
        before += ((number >= 0) & (number < expert)).to(tl.int32)
        own += (number == expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts + expert, place)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, place + tl.sum(own, 0))
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        mine = tl.load(ids + pair, mask=pair < pairs, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + place + rank - 1, pair, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)
