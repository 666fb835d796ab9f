"""Tokens of a list of entries, each a block and the range of it that is seen."""

import triton
import triton.language as tl


@triton.jit
def find_tokens(first, stop, blocks, lo, hi, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tokens [first, first + BLOCK_N) of a list that ends before entry `stop`: block, place in it, bool whether it is
    seen; [BLOCK_N] each, but one block where a step is of one. blocks int64, lo, hi int32 [entries]."""
    if BLOCK_SIZE % BLOCK_N == 0:
        entry = first // BLOCK_SIZE
        token = first % BLOCK_SIZE + tl.arange(0, BLOCK_N)
        seen = (token >= tl.load(lo + entry)) & (token < tl.load(hi + entry))
        block = tl.load(blocks + entry)
    else:
        entry = (first + tl.arange(0, BLOCK_N)) // BLOCK_SIZE
        token = (first + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
        inside = entry < stop
        lowest = tl.load(lo + entry, mask=inside, other=0)
        seen = (token >= lowest) & (token < tl.load(hi + entry, mask=inside, other=0))
        block = tl.load(blocks + entry, mask=inside, other=0)
    return block, token, seen
