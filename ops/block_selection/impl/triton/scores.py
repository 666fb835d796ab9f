"""Shares of a span's attention from estimates: a softmax over the candidates of the span, per row and head."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["candidates", "lines"])
def span_sums(
    estimates,
    spans,
    tops,
    sums,
    candidates,
    lines,
    LOOKED_AT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (tiles of BLOCK_L lines, spans). estimates: fp32 [lines, candidates], a line is a row and a head.

    Lines are on the first axis: CUDA allows 65,535 on the other, and a prompt's rows times heads are more.
    tops, sums: fp32 [spans, lines] of the softmax over a span's candidates, mostly neighbours; NaN is left out.
    """
    span = tl.program_id(1)
    line = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    begin, end = candidates, 0
    for first in range(0, candidates, LOOKED_AT):
        c = first + tl.arange(0, LOOKED_AT)
        mine = tl.load(spans + c, mask=c < candidates, other=-1) == span
        begin = tl.minimum(begin, tl.min(tl.where(mine, c, candidates), 0))
        end = tl.maximum(end, tl.max(tl.where(mine, c + 1, 0), 0))
    top = tl.full([BLOCK_L], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_L], tl.float32)
    for first in range(begin, end, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        mine = tl.load(spans + c, mask=c < end, other=-1) == span
        places = estimates + line.to(tl.int64)[:, None] * candidates + c[None, :]
        found = tl.load(places, mask=mine[None, :] & (line < lines)[:, None], other=float("-inf"))
        found = tl.where(found == found, found, float("-inf"))
        new_top = tl.maximum(top, tl.max(found, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(found - base[:, None]), 1)
        top = new_top
    place = span * lines + line
    tl.store(tops + place, tl.where(top == float("-inf"), 0.0, top), mask=line < lines)
    tl.store(sums + place, tl.where(total == 0.0, 1.0, total), mask=line < lines)


@triton.jit(do_not_specialize=["candidates", "lines"])
def block_shares(
    estimates, spans, num_rows, tops, sums, scores, candidates, lines,
    HEADS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_C candidates. scores: fp32 [candidates], the mean share of the span's rows and heads."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < candidates
    span = tl.load(spans + c, mask=inside, other=0)
    mass = tl.zeros([BLOCK_C], tl.float32)
    broken = tl.zeros([BLOCK_C], tl.int32)
    for first in range(0, lines, BLOCK_L):
        line = first + tl.arange(0, BLOCK_L)
        mask = inside[None, :] & (line < lines)[:, None]
        places = line.to(tl.int64)[:, None] * candidates + c[None, :]
        found = tl.load(estimates + places, mask=mask, other=float("-inf"))
        place = span[None, :] * lines + line[:, None]
        top = tl.load(tops + place, mask=mask, other=0.0)
        total = tl.load(sums + place, mask=mask, other=1.0)
        broken = tl.maximum(broken, tl.max(tl.where(found == found, 0, 1), 0))
        mass += tl.sum(tl.exp(tl.where(found == found, found, float("-inf")) - top) / total, 0)
    rows = tl.maximum(tl.load(num_rows + span, mask=inside, other=1), 1)
    tl.store(scores + c, tl.where(broken > 0, 1.0, mass / (rows * HEADS).to(tl.float32)), mask=inside)
