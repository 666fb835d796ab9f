"""Unified Attention in plain torch: it defines the semantics, and every other implementation is tested against it.

All arithmetic is fp32 for any inputs, with natural logarithms. Nothing here reads a tensor on the host, so the same
code runs inside a captured graph: the bounds of the loops (slices, groups, shapes) are on the host already.

Garbage: a token that a row does not see must not reach it, but NaN times weight 0 is NaN. So scores are *replaced* by
-inf, and non-finite values enter the product as 0. A token whose key or value is NaN or infinite in any element has the
score NaN, and with it every row that sees the token, in all elements of the heads that read it, whatever its weight; so
broken requests stay detectable. Inf is no better than NaN: it comes from an overflow, and Inf times a weight that was
rounded to 0 is NaN anyway. Other implementations may miss one case: a key with a score of -Inf has weight 0.
Source: seed 001; design.md 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.implementation import AttentionImplementation
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    NEG_INF,
    AttentionParts,
    CausalPart,
    Partial,
    SelectedPart,
    SharedGroup,
    SharedPart,
    UniquePart,
    combine,
    merge,
    nothing,
    reduce_to_rows,
    shift,
)
from vllm_gaudi_ucm.ops.unified_attention.spec import NOTHING_PER_HEAD, AttentionSpec, PerHead

# A tile of scores is at most ROW_TILE x TOKEN_TILE per head: memory is bounded however many rows share how many blocks.
ROW_TILE = 256
TOKEN_TILE = 2048
# exp of it is 1.6e-38, a normal number that counts as 0: compared with the 1 of the largest score it vanishes.
LEAST_EXPONENT, LEAST_WEIGHT = -87.0, 2e-38


class ReferenceAttention(AttentionImplementation):
    """The reference: plain torch, on any device."""

    gives_log_sums = True

    def supports(self, spec: AttentionSpec) -> bool:
        return True

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: AttentionParts,
        spec: AttentionSpec,
        out: Tensor,
        selected_blocks: Tensor | None = None,
        per_head: PerHead = NOTHING_PER_HEAD,
        log_sums: Tensor | None = None,
    ) -> bool:
        """Writes the merge of the existing parts, which are the plan. Always returns True."""
        parts, slopes = plan, _Slopes.of(per_head.slopes, plan.positions)
        partials = []
        if parts.causal is not None:
            partials.append(causal(query, key, value, parts.causal, spec, slopes))
        if parts.shared is not None:
            partials.append(shared(query, key_cache, value_cache, parts.shared, spec, slopes))
        if parts.unique is not None:
            partials.append(unique(query, key_cache, value_cache, parts.unique, spec, slopes))
        if parts.selected is not None:
            blocks = parts.selected.blocks if selected_blocks is None else selected_blocks
            partials.append(selected(query, key_cache, value_cache, parts.selected, spec, blocks))
        if per_head.sinks is not None:
            partials.append(sink(query, value.shape[-1], per_head.sinks))
        merge(partials, out, log_sums)
        return True


class _Slopes(NamedTuple):
    """Slopes of ALiBi: fp32 [heads], and the position of each row, int64 [rows]."""

    slopes: Tensor
    positions: Tensor

    @classmethod
    def of(cls, slopes: Tensor | None, positions: Tensor | None) -> _Slopes | None:
        return None if slopes is None or positions is None else cls(slopes, positions)

    def bias(self, distance: Tensor) -> Tensor:
        """Returns the bias fp32 [..., rows, heads, tokens] for distances [..., rows, tokens]."""
        return -self.slopes[:, None] * distance[..., None, :]


def sink(query: Tensor, value_dim: int, sinks: Tensor) -> Partial:
    """Returns the sinks as a partial of all rows: a term of each sum, without a value."""
    found = nothing(query, query.shape[0], value_dim)
    return Partial(found.out, sinks.float().expand_as(found.max), torch.ones_like(found.sum))


def causal(
    query: Tensor, key: Tensor, value: Tensor, part: CausalPart, spec: AttentionSpec, slopes: _Slopes | None = None
) -> Partial:
    """Computes the causal part, slice by slice; rows of different groups never see each other.

    query: [rows, heads, dim]; key: [rows, kv_heads, dim]; value: [rows, kv_heads, value_dim]. The partial has all rows.
    """
    position = torch.arange(query.shape[0], device=query.device)
    pieces, end, in_order = [], 0, True
    for query_lo, query_hi, key_lo, key_hi in part.slices:
        in_order, end = in_order and query_lo == end, query_hi
        rows, keys = slice(query_lo, query_hi), slice(key_lo, key_hi)
        same = (part.groups[rows, None] == part.groups[None, keys]) & (part.groups[rows, None] >= 0)
        if spec.both_ways:
            near = (position[None, keys] - position[rows, None]).abs() < (spec.reach or query.shape[0])
            visible = same & near
        else:
            visible = same & (position[None, keys] <= position[rows, None])
        if part.first_rows is not None:
            visible &= position[None, keys] >= part.first_rows[rows, None]
        bias = None if slopes is None else slopes.bias(position[rows, None] - position[None, keys])
        pieces.append((rows, _attend_visible(query[rows], key[keys], value[keys], visible, spec, bias)))
    if pieces and in_order and end == query.shape[0]:
        return _joined([piece for _, piece in pieces])
    result = nothing(query, query.shape[0], value.shape[-1])
    for rows, piece in pieces:
        for whole, tile in zip(result, piece, strict=True):
            whole[rows] = tile
    return result


def shared(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    part: SharedPart,
    spec: AttentionSpec,
    slopes: _Slopes | None = None,
) -> Partial:
    """Computes the shared part; the work is rows x blocks of its groups. The partial has all rows."""
    result = nothing(query, query.shape[0], value_cache.shape[-1])
    for number, group in enumerate(part.groups):
        for rows in group.rows.split(ROW_TILE):
            found = _shared_rows(query, key_cache, value_cache, part, group._replace(rows=rows), spec, slopes)
            if number:  # rows of an earlier group may be among them
                found = combine(Partial(*(whole[rows] for whole in result)), found)
            for whole, tile in zip(result, found, strict=True):
                whole.index_copy_(0, rows, tile)
    return result


def _shared_rows(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    part: SharedPart,
    group: SharedGroup,
    spec: AttentionSpec,
    slopes: _Slopes | None,
) -> Partial:
    """Computes the partial of one tile of rows of a group, a tile of blocks at a time."""
    block_size = key_cache.shape[1]
    spans = part.row_spans[group.rows]
    token = torch.arange(block_size, device=query.device)
    tile = max(1, TOKEN_TILE // block_size)
    result = None
    for first in range(group.block_lo, group.block_hi, tile):
        blocks = slice(first, min(first + tile, group.block_hi))
        ids = part.blocks[blocks]
        lo = part.lo_of(group.rows, blocks)
        visible = _in_range(lo, part.hi[:, blocks][spans], block_size).flatten(1)
        bias = None
        if slopes is not None:
            bias = slopes.bias((slopes.positions[group.rows, None, None] + lo[..., None] - token).flatten(1))
        piece = _attend_visible(
            query[group.rows], key_cache[ids].flatten(0, 1), value_cache[ids].flatten(0, 1), visible, spec, bias
        )
        result = piece if result is None else combine(result, piece)
    return nothing(query, group.rows.shape[0], value_cache.shape[-1]) if result is None else result


def unique(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    part: UniquePart,
    spec: AttentionSpec,
    slopes: _Slopes | None = None,
) -> Partial:
    """Computes the unique part, block by block. The partial has only the single rows [0, num_rows)."""
    count, block_size = part.rows.shape[0], key_cache.shape[1]
    result = nothing(query, part.num_rows, value_cache.shape[-1])
    if count == 0 or part.num_rows == 0:
        return result
    tile = max(1, ROW_TILE * TOKEN_TILE // (8 * block_size))
    pieces = []
    for first in range(0, count, tile):
        span = slice(first, min(first + tile, count))
        ids = span if part.blocks is None else part.blocks[span]
        visible = _in_range(part.lo[span], part.hi[span], block_size)[:, None]
        rows, bias = query[part.rows[span], None], None
        if slopes is not None:
            token = torch.arange(block_size, device=query.device)
            bias = slopes.bias((slopes.positions[part.rows[span], None] + part.lo[span, None] - token)[:, None])
        pieces.append(_attend_visible(rows, key_cache[ids], value_cache[ids], visible, spec, bias))
    piece = Partial(*(tensor.squeeze(1) for tensor in _joined(pieces)))
    return reduce_to_rows(piece, part.rows, result)


def selected(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, part: SelectedPart, spec: AttentionSpec, blocks: Tensor
) -> Partial:
    """Computes the selected part; reads each of `blocks`, int64 [selected], once per span. The partial has all rows."""
    result = nothing(query, query.shape[0], value_cache.shape[-1])
    num_spans, most = part.first_rows.shape[0], part.max_rows
    if 0 in (blocks.shape[0], num_spans, query.shape[0]):
        return result
    step = torch.arange(most, device=query.device)
    inside = step < part.num_rows[:, None]
    rows = (part.first_rows[:, None] + step).clamp(max=query.shape[0] - 1)
    places = torch.arange(num_spans * most, device=query.device).view(num_spans, most)

    of_spans = None
    tile = max(1, ROW_TILE * TOKEN_TILE // (8 * most * key_cache.shape[1]))
    tiles = zip(blocks.split(tile), part.spans.split(tile), part.hi.split(tile), strict=True)
    for ids, spans, hi in tiles:
        visible = _in_range(torch.zeros_like(hi), hi, key_cache.shape[1])[:, None] & inside[spans][..., None]
        tensors = _attend_visible(query[rows[spans]], key_cache[ids], value_cache[ids], visible, spec)
        piece = Partial(*(tensor.flatten(0, 1) for tensor in tensors))
        empty = nothing(query, num_spans * most, value_cache.shape[-1])
        sums = reduce_to_rows(piece, places[spans].flatten(), empty)
        of_spans = sums if of_spans is None else combine(of_spans, sums)
    assert of_spans is not None, "there is at least one tile"
    # A row past the span's own rows has seen no token, so it may be added to any row.
    return reduce_to_rows(of_spans, rows.flatten(), result)


def _attend_visible(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, spec: AttentionSpec, bias: Tensor | None = None
) -> Partial:
    """Returns the partial of query [..., rows, heads, dim] over key and value [..., tokens, kv_heads, dim].

    visible: bool [..., rows, tokens]. bias: fp32 [..., rows, heads, tokens] added to scores.
    """
    if key.dtype == torch.float8_e4m3fn:
        key, value = key.float(), value.float()
    kv_heads = key.shape[-2]
    folded = query.float().unflatten(-2, (kv_heads, -1))
    # x - x is 0, or NaN where x is not finite: its sum takes a tenth of the time of isfinite().all()
    broken = ((key - key).sum(-1) + (value - value).sum(-1)).float().transpose(-2, -1)[..., None, :, None, :]
    scores = torch.einsum("...rhgd,...shd->...rhgs", folded, key.float())
    if spec.logits_soft_cap is None:
        scores = torch.add(broken, scores, alpha=spec.scale)
    else:
        scores = torch.tanh(scores * (spec.scale / spec.logits_soft_cap)) * spec.logits_soft_cap + broken
    if bias is not None:
        scores = scores + bias.unflatten(-2, (kv_heads, -1))
    scores = torch.where(visible[..., None, None, :], scores, NEG_INF)
    top = scores.amax(-1)
    weights = _weights(scores, shift(top)[..., None])
    total = weights.sum(-1)
    finite = torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0).float()
    out = torch.einsum("...rhgs,...shd->...rhgd", weights, finite)
    return Partial(out.flatten(-3, -2), top.flatten(-2), total.flatten(-2))


def _weights(scores: Tensor, top: Tensor) -> Tensor:
    """Returns exp(scores - top), or 0 if it is negligible: MKL's exp takes 14 times as long when it underflows."""
    weights = (scores - top).clamp_(min=LEAST_EXPONENT).exp_()
    return torch.threshold_(weights, LEAST_WEIGHT, 0.0)


def _joined(pieces: Sequence[Partial]) -> Partial:
    return pieces[0] if len(pieces) == 1 else Partial(*map(torch.cat, zip(*pieces, strict=True)))


def _in_range(lo: Tensor, hi: Tensor, block_size: int) -> Tensor:
    """Returns bool [..., block_size]: True for tokens of the block in [lo, hi)."""
    token = torch.arange(block_size, device=lo.device)
    return (token >= lo[..., None]) & (token < hi[..., None])
