"""KV-cache kernels in Triton: copies of whole blocks in all layers at once, and the write of new rows."""

import triton
import triton.language as tl


@triton.jit
def copy_pairs(
    addresses,
    pairs,
    size,
    pieces,
    layers,
    s_block,
    t_block,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (pairs times pieces of a block, layers). addresses: int64 [2 * layers], the sources' and the targets'.

    pairs: int64 [n, 2]; size: elements of a block, one run in both; WORD: an integer as wide.
    Pairs are on the first axis: CUDA allows 65,535 on the others, and there may be more blocks than that.
    """
    pair = (tl.program_id(0) // pieces).to(tl.int64)
    layer = tl.program_id(1)
    element = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    mask = element < size
    origin, goal = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
    source = tl.load(addresses + layer).to(tl.pointer_type(WORD))
    target = tl.load(addresses + layers + layer).to(tl.pointer_type(WORD))
    found = tl.load(source + origin * s_block + element, mask=mask)
    tl.store(target + goal * t_block + element, found, mask=mask)


@triton.jit
def _write_row(
    tokens,
    cache,
    row,
    slot,
    t_row,
    t_head,
    c_slot,
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
        place = slot * c_slot + head * c_head + d
        tl.store(cache + place, found.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def write_rows(
    key,
    value,
    key_rows,
    value_rows,
    slots,
    num_slots,
    k_row,
    k_head,
    v_row,
    v_head,
    kc_slot,
    kc_head,
    vc_slot,
    vc_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program; a row with a slot (int64) outside the cache is not written."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (slot >= 0) & (slot < num_slots):
        _write_row(key, key_rows, row, slot, k_row, k_head, kc_slot, kc_head, HEADS, DIM, BLOCK)
        _write_row(value, value_rows, row, slot, v_row, v_head, vc_slot, vc_head, HEADS, VALUE_DIM, BLOCK)
