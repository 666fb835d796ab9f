"""Grouped products: a program multiplies some pairs of one expert by some columns of its weights.

All take ids [pairs], and order [pairs] and starts [EXPERTS + 1] of `group_pairs`, which are not read if APART: then
each pair is a tile of its own. SPREAD: EXPERTS, up to a power of two. COMPUTE: the dtype that is multiplied.
"""

import torch
import triton
import triton.language as tl

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def find_tile(
    ids, order, starts, tile, EXPERTS: tl.constexpr, SPREAD: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr
):
    """(expert, pairs [ROWS], which of them there are); EXPERTS or more, or below 0: the tile is empty."""
    lane = tl.arange(0, ROWS)
    if APART:
        expert = tl.load(ids + tile).to(tl.int32)
        pair = tile + lane * 0
        mask = lane == 0
    else:
        number = tl.arange(0, SPREAD)
        begin = tl.load(starts + number, mask=number < EXPERTS, other=0)
        end = tl.load(starts + number + 1, mask=number < EXPERTS, other=0)
        tiles = (end - begin + ROWS - 1) // ROWS
        until = tl.cumsum(tiles, 0)
        expert = tl.sum((until <= tile).to(tl.int32), 0)
        own = number == expert
        first = tl.sum(tl.where(own, until - tiles, 0), 0)
        place = tl.sum(tl.where(own, begin, 0), 0) + (tile - first) * ROWS + lane
        mask = place < tl.sum(tl.where(own, end, 0), 0)
        pair = tl.load(order + place, mask=mask, other=0)
    return expert, pair.to(tl.int64), mask


@triton.jit
def gate(gates, up, FORM: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """Returns float32, the result of an expert's gate between its products. FORM, ALPHA, BETA, LIMIT: see
    `multiply_gated`.
    """
    if LIMIT > 0:
        # NaN stays
        gates = tl.where(gates > LIMIT, LIMIT, gates)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if FORM == "silu":
        gates = gates / (1.0 + tl.exp(-ALPHA * gates))
    elif FORM == "gelu":
        gates = 0.5 * gates * (1.0 + tl.erf(gates * 0.7071067811865476))
    else:
        # g / 2 * (1 + tanh(y)) = g * sigmoid(2 y), y = sqrt(2 / pi) * (g + 0.044715 g^3)
        gates = gates / (1.0 + tl.exp(-1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)))
    return gates * (up + BETA)


@triton.jit
def multiply_gated(
    x,
    weights,
    bias,
    out,
    ids,
    order,
    starts,
    size,
    depth,
    chosen,
    FORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    EXPERTS: tl.constexpr,
    SPREAD: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """x [rows, depth] times weights [EXPERTS, 2 * size, depth], and the gate; rounded once.

    bias: [EXPERTS, 2 * size] or None. out: [pairs, size]; pairs without an expert are not written.
    FORM, INTERLEAVED, ALPHA, BETA, LIMIT: as in MoeSpec; a LIMIT of 0 is none.
    """
    pieces = tl.cdiv(size, COLUMNS)
    expert, pair, present = find_tile(ids, order, starts, tl.program_id(0) // pieces, EXPERTS, SPREAD, APART, ROWS)
    if (expert < 0) | (expert >= EXPERTS):
        return
    column = tl.program_id(0) % pieces * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    gate_row = column * 2 if INTERLEAVED else column
    up_row = gate_row + 1 if INTERLEAVED else column + size
    part = tl.arange(0, DEPTH)
    matrix = weights + expert.to(tl.int64) * 2 * size * depth
    given = x + (pair // chosen)[:, None] * depth
    gates = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, depth, DEPTH):
        at = first + part
        a = tl.load(given + at[None, :], mask=present[:, None] & (at < depth)[None, :], other=0.0)
        valid = (at < depth)[:, None] & inside[None, :]
        b = tl.load(matrix + gate_row.to(tl.int64)[None, :] * depth + at[:, None], mask=valid, other=0.0)
        gates = tl.dot(a.to(COMPUTE), b.to(COMPUTE), gates, input_precision="ieee")
        b = tl.load(matrix + up_row.to(tl.int64)[None, :] * depth + at[:, None], mask=valid, other=0.0)
        up = tl.dot(a.to(COMPUTE), b.to(COMPUTE), up, input_precision="ieee")
    if bias is not None:
        added = bias + expert.to(tl.int64) * 2 * size
        gates += tl.load(added + gate_row, mask=inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(added + up_row, mask=inside, other=0.0).to(tl.float32)[None, :]
    found = gate(gates, up, FORM, ALPHA, BETA, LIMIT).to(out.dtype.element_ty)
    tl.store(out + pair[:, None] * size + column[None, :], found, mask=present[:, None] & inside[None, :])


@triton.jit
def multiply_shared(
    x,
    weights,
    bias,
    out,
    shares,
    ids,
    order,
    starts,
    size,
    depth,
    EXPERTS: tl.constexpr,
    SPREAD: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """x [pairs, depth] times weights [EXPERTS, size, depth], times each pair's share [pairs]; rounded once.

    bias: [EXPERTS, size] or None. out: [pairs, size]; pairs without an expert are not written.
    """
    pieces = tl.cdiv(size, COLUMNS)
    expert, pair, present = find_tile(ids, order, starts, tl.program_id(0) // pieces, EXPERTS, SPREAD, APART, ROWS)
    if (expert < 0) | (expert >= EXPERTS):
        return
    column = tl.program_id(0) % pieces * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    part = tl.arange(0, DEPTH)
    matrix = weights + expert.to(tl.int64) * size * depth
    given = x + pair[:, None] * depth
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, depth, DEPTH):
        at = first + part
        a = tl.load(given + at[None, :], mask=present[:, None] & (at < depth)[None, :], other=0.0)
        valid = (at < depth)[:, None] & inside[None, :]
        b = tl.load(matrix + column.to(tl.int64)[None, :] * depth + at[:, None], mask=valid, other=0.0)
        found = tl.dot(a.to(COMPUTE), b.to(COMPUTE), found, input_precision="ieee")
    if bias is not None:
        found += tl.load(bias + expert.to(tl.int64) * size + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    share = tl.load(shares + pair, mask=present, other=0.0).to(tl.float32)
    found = (found * share[:, None]).to(out.dtype.element_ty)
    tl.store(out + pair[:, None] * size + column[None, :], found, mask=present[:, None] & inside[None, :])
