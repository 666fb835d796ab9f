"""Whole blocks of all layers from one cache to another on the same device, in one launch."""

import triton
import triton.language as tl


@triton.jit
def copy_pairs(
    source,
    target,
    pairs,
    size,
    pieces,
    s_layer,
    s_block,
    t_layer,
    t_block,
    BLOCK: tl.constexpr,
):
    """Grid (pairs times pieces of a block, layers). pairs: int64 [n, 2]; size: elements of a block, one run in both.

    Pairs are on the first axis: CUDA allows 65,535 on the others, and there may be more blocks than that.
    """
    pair = (tl.program_id(0) // pieces).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    mask = element < size
    origin, goal = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
    found = tl.load(source + layer * s_layer + origin * s_block + element, mask=mask)
    tl.store(target + layer * t_layer + goal * t_block + element, found, mask=mask)
