"""Block selection in plain torch, which defines the semantics. It reads no tensor on the host; shapes are static."""

from math import log

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.features import (
    SummaryKind,
    block_features,
    query_features,
    summarise,
)
from vllm_gaudi_ucm.ops.block_selection.implementation import BlockSelectionImplementation
from vllm_gaudi_ucm.ops.index_maximum import index_maximum_
from vllm_gaudi_ucm.ops.narrow_floats import E4M3, narrow, put

NEG_INF = float("-inf")

# Modes of `keep_or_replace`; 0 selects again.
REUSE, CHECK = 1, 2

# Up to this many spans, every query is multiplied with every block and only the span's own products are kept. This is
# cheaper than copying the query to each of its blocks, because a product is smaller than a query head by the head's
# dimension.
FEW_SPANS = 32
# Elements of the largest intermediate tensor: memory is bounded however many candidates there are.
TILE = 1 << 24


class ReferenceBlockSelection(BlockSelectionImplementation):
    """The reference: leaves all to the functions below, which compute any tensors on any device."""


def write(key_cache: Tensor, blocks: Tensor, summaries: Tensor, kind: SummaryKind) -> None:
    """Replaces the summaries of the blocks, in place."""
    found = summarise(key_cache.index_select(0, blocks), kind)
    put(summaries, 0, blocks, narrow(found) if summaries.dtype == E4M3 else found.to(summaries.dtype))


def scores(
    query: Tensor,
    summaries: Tensor,
    blocks: Tensor,
    spans: Tensor,
    first_rows: Tensor,
    num_rows: Tensor,
    max_rows: int,
    scale: float,
    kind: SummaryKind,
) -> Tensor:
    """Softmax of the estimates over the candidates of a span, averaged over its rows and heads: fp32 [candidates]."""
    step = torch.arange(max_rows, device=query.device)
    rows = (first_rows[:, None] + step).clamp(max=query.shape[0] - 1)
    features = query_features(query, kind)[rows] * scale
    estimates = _estimates(features, summaries, blocks, spans, kind)

    seen = (step < num_rows[:, None])[spans][:, :, None]
    # A value that is not a number must neither spread to the span's other blocks nor go unnoticed: see below.
    broken = seen & ~estimates.isfinite()
    estimates = estimates.masked_fill(~seen | broken, NEG_INF)
    nothing = estimates.new_zeros((num_rows.shape[0], *estimates.shape[1:]))
    top = index_maximum_(nothing + NEG_INF, spans, estimates)
    weights = torch.exp(estimates - torch.where(top == NEG_INF, 0.0, top)[spans])
    total = nothing.index_add_(0, spans, weights)
    # A sum of 0 means that the row is a pad, since a real row sees something in its span.
    share = 1.0 / (torch.where(total == 0, 1.0, total) * (num_rows.clamp(min=1) * query.shape[1])[:, None, None])
    mass = (weights * share[spans]).flatten(1).sum(1)
    # A broken block is chosen first, so the output of its request breaks too and the fault is detected.
    return torch.where(broken.flatten(1).any(1), 1.0, mass)


def _estimates(features: Tensor, summaries: Tensor, blocks: Tensor, spans: Tensor, kind: SummaryKind) -> Tensor:
    """fp32 [candidates, max_rows, heads]: estimated log-mean-exp of the scores of the block's tokens.

    features: fp32 [spans, max_rows, heads, features].
    """
    num_spans, max_rows, heads, width = features.shape
    vectors, kv_heads = summaries.shape[1:3]
    folded = features.unflatten(2, (kv_heads, -1))
    few = num_spans <= FEW_SPANS
    tile = max(1, TILE // (max_rows * heads * max(vectors * num_spans if few else width, vectors)))
    pieces = []
    for ids, owners in zip(blocks.split(tile), spans.split(tile), strict=True):
        boxes = block_features(summaries, kind, ids)
        piece = _of_every_span(folded, boxes, owners) if few else _of_own_span(folded, boxes, owners)
        pieces.append(_log_mean_exp(piece, kind.first_weight).flatten(2))
    return torch.cat(pieces)


def _of_every_span(folded: Tensor, boxes: Tensor, spans: Tensor) -> Tensor:
    """[spans, max_rows, kv_heads, group, features] x [blocks, boxes, kv_heads, features]
    -> [blocks, boxes, max_rows, kv_heads, group]."""
    num_spans, max_rows, kv_heads, group, _ = folded.shape
    product = boxes.permute(2, 0, 1, 3).flatten(1, 2) @ folded.permute(2, 4, 0, 1, 3).flatten(2)
    product = product.view(kv_heads, *boxes.shape[:2], num_spans, max_rows * group)
    if num_spans > 1:
        own = spans[None, :, None, None, None].expand(kv_heads, -1, boxes.shape[1], 1, max_rows * group)
        product = product.gather(3, own)
    return product.view(kv_heads, *boxes.shape[:2], max_rows, group).permute(1, 2, 3, 0, 4)


def _of_own_span(folded: Tensor, boxes: Tensor, spans: Tensor) -> Tensor:
    """Computes the same products by copying the features of its span to each block."""
    return torch.einsum("trkgf,tbkf->tbrkg", folded[spans], boxes)


def _log_mean_exp(estimates: Tensor, first_weight: int) -> Tensor:
    """Over the boxes [blocks, boxes, ...]; the first one counts as so many of the others."""
    boxes = estimates.shape[1]
    if boxes == 1:
        return estimates[:, 0]
    singles = estimates[:, 1:].logsumexp(1)
    return torch.logaddexp(estimates[:, 0] + log(first_weight), singles) - log(first_weight + boxes - 1)


def choose(scores: Tensor, places: Tensor, num_spans: int, width: int, most: int) -> Tensor:
    """Logical block numbers by descending score, then -1: int64 [num_spans, most]."""
    # The last place takes what is not selectable. Any candidate is above it.
    table = scores.new_full((num_spans * width + 1,), NEG_INF, dtype=torch.float32)
    table.index_copy_(0, places, scores.float().clamp(min=torch.finfo(torch.float32).min))
    ranked, order = table[:-1].view(num_spans, width).sort(dim=1, descending=True, stable=True)
    # integers are chosen by arithmetic: Gaudi's compiler is known to get `where` of integers wrong
    order = (order - (order + 1) * (ranked == NEG_INF))[:, :most]
    return torch.nn.functional.pad(order, (0, most - order.shape[1]), value=-1)


def keep_or_replace(
    stored: Tensor, fresh: Tensor, counts: Tensor, modes: Tensor, thresholds: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the new ranking, and the spans for which a check kept or replaced the stored one."""
    first = torch.arange(stored.shape[1], device=stored.device) < counts[:, None]
    old, old_valid = _members(stored, first, width)
    new, _ = _members(fresh, first, width)
    close = (old != new).sum(1) <= thresholds
    check = modes == CHECK
    kept = check & close & (old_valid >= counts)
    keep = kept | (modes == REUSE)
    return fresh + (stored - fresh) * keep[:, None], kept, check & ~kept


def _members(ranking: Tensor, first: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The first entries as a set, bool [spans, width], and how many of them are blocks, int64 [spans]."""
    valid = first & (ranking >= 0) & (ranking < width)
    table = torch.zeros((ranking.shape[0], width + 1), dtype=torch.bool, device=ranking.device)
    table.scatter_(1, width + (ranking - width) * valid, True)
    return table[:, :width], valid.sum(1)
