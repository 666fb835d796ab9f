"""The best blocks of each span: a block's place in the ranking is the number of blocks that come before it."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["candidates", "end"])
def place_scores(scores, places, keys, candidates, end, BLOCK_C: tl.constexpr):
    """keys: int32 [end], the smallest number where no candidate is, else larger for larger scores, NaN the largest."""
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
    """Grid (spans, tiles of BLOCK_W blocks). keys: int32 [spans, width]; ranking: int64 [spans, most], of which the
    first `width` of each are written."""
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
