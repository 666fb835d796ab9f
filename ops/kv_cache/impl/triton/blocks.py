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


@triton.jit
def _write_row(
    tokens,
    cache,
    row,
    block,
    token,
    t_row,
    t_head,
    c_block,
    c_token,
    c_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for first in tl.static_range(0, HEADS * DIM, BLOCK):
        element = first + tl.arange(0, BLOCK)
        mask = element < HEADS * DIM
        head, d = element // DIM, element % DIM
        found = tl.load(tokens + row * t_row + head * t_head + d, mask=mask)
        place = block * c_block + token * c_token + head * c_head + d
        tl.store(cache + place, found.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def write_rows(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    num_slots,
    k_row,
    k_head,
    v_row,
    v_head,
    kc_block,
    kc_token,
    kc_head,
    vc_block,
    vc_token,
    vc_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program; a row whose slot (int64) lies outside of the cache is not written."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (slot >= 0) & (slot < num_slots):
        block, token = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        _write_row(key, key_cache, row, block, token, k_row, k_head, kc_block, kc_token, kc_head, HEADS, DIM, BLOCK)
        _write_row(
            value, value_cache, row, block, token, v_row, v_head, vc_block, vc_token, vc_head, HEADS, VALUE_DIM, BLOCK
        )
