"""Rotary position embedding of query and key heads, in place."""

import triton
import triton.language as tl


@triton.jit
def _rotate(
    x,
    row,
    group,
    position,
    num_positions,
    angles,
    x_row,
    x_head,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    head = (group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    element = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    start = x + row * x_row + head * x_head
    mask = (head < HEADS) & (pair < HALF)
    both_mask = (head < HEADS) & (element < 2 * HALF)
    if IS_NEOX:
        a = tl.load(start + pair, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(start + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    else:
        # both of a pair in one load
        both = tl.load(start + element, mask=both_mask, other=0.0).to(tl.float32)
        a, b = tl.split(both.reshape(BLOCK_HEADS, BLOCK_HALF, 2))
    # every head loads the angles itself, from the first cache: to share them takes barriers
    at = position + 0 * head + 0 * pair
    known = (pair < HALF) & (at >= 0) & (at < num_positions)
    place = angles + at * (2 * HALF) + pair
    cos = tl.load(place, mask=known, other=float("nan")).to(tl.float32)
    sin = tl.load(place + HALF, mask=known, other=float("nan")).to(tl.float32)
    first, second = a * cos - b * sin, b * cos + a * sin
    if IS_NEOX:
        tl.store(start + pair, first.to(x.dtype.element_ty), mask=mask)
        tl.store(start + HALF + pair, second.to(x.dtype.element_ty), mask=mask)
    else:
        turned = tl.join(first, second).reshape(BLOCK_HEADS, 2 * BLOCK_HALF)
        tl.store(start + element, turned.to(x.dtype.element_ty), mask=both_mask)


@triton.jit
def rotate_heads(
    query,
    key,
    positions,
    angles,
    num_positions,
    q_row,
    q_head,
    k_row,
    k_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Grid (rows, groups of query heads and then of key heads), BLOCK_HEADS to a group.

    angles: [num_positions, 2 * HALF], cosines before sines; a position without angles makes a row of NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions + row)
    groups: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if group < groups:
        _rotate(
            query,
            row,
            group,
            position,
            num_positions,
            angles,
            q_row,
            q_head,
            HEADS,
            HALF,
            IS_NEOX,
            BLOCK_HEADS,
            BLOCK_HALF,
        )
    else:
        _rotate(
            key,
            row,
            group - groups,
            position,
            num_positions,
            angles,
            k_row,
            k_head,
            KV_HEADS,
            HALF,
            IS_NEOX,
            BLOCK_HEADS,
            BLOCK_HALF,
        )
