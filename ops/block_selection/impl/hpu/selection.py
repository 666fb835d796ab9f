"""Block selection in few operators that Gaudi has: no index of several dimensions, no stable sort, no integer `where`.

A graph has the same operators whatever its sizes. It computes what the reference defines, except for ties, of which
`topk` may take any.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind, block_features, query_features
from vllm_gaudi_ucm.ops.block_selection.impl.reference import CHECK, REUSE
from vllm_gaudi_ucm.ops.block_selection.implementation import BlockSelectionImplementation, Prepared, PreparedSpans
from vllm_gaudi_ucm.ops.index_maximum import index_maximum

LOWEST = torch.finfo(torch.float32).min
# The maximum if there is no estimate. Entries that are not seen are so far below it that their weight is 0.
SEES_NOTHING = LOWEST / 2
LEAST_SUM = 1e-30
NEG_INF = float("-inf")


class HpuBlockSelection(BlockSelectionImplementation):
    """Block selection for Gaudi; runs on any device if chosen by name."""

    devices = frozenset({"hpu"})
    priority = 20

    def unavailable(self, device: str) -> str | None:
        return None

    def prepare(
        self,
        spans: Tensor,
        first_rows: Tensor,
        num_rows: Tensor,
        max_rows: int,
        counts: Tensor,
        modes: Tensor,
        most: int,
    ) -> PreparedSpans:
        return PreparedSpans(*_rows(spans, first_rows, num_rows, max_rows), *_rules(counts, modes, most))

    def scores(
        self,
        query: Tensor,
        summaries: Tensor,
        blocks: Tensor,
        spans: Tensor,
        first_rows: Tensor,
        num_rows: Tensor,
        max_rows: int,
        scale: float,
        kind: SummaryKind,
        prepared: Prepared | None = None,
    ) -> Tensor:
        count, heads = blocks.shape[0], query.shape[1]
        if not count:
            return query.new_empty(0, dtype=torch.float32)
        rows, seen, hidden = (
            prepared[:3] if isinstance(prepared, PreparedSpans) else _rows(spans, first_rows, num_rows, max_rows)
        )
        features = (query_features(query, kind) * scale).index_select(0, rows)
        boxes = block_features(summaries, kind, blocks)
        estimates = _estimates(features.unflatten(0, (count, max_rows)), boxes, kind.first_weight)

        # a value that is not a number must neither spread to the span's other blocks nor go unnoticed: see below
        numbers = estimates.nan_to_num(LOWEST, LOWEST, LOWEST)
        unknown = numbers != estimates
        estimates = numbers.masked_fill(hidden, LOWEST).flatten(1)
        top = index_maximum(estimates.new_full((num_rows.shape[0], max_rows * heads), SEES_NOTHING), spans, estimates)
        weights = torch.exp(estimates - top.index_select(0, spans))
        # the largest weight of a row is 1, so the initial value of the sum is lost in it, except in rows that see
        # nothing
        total = torch.full_like(top, LEAST_SUM).index_add(0, spans, weights).index_select(0, spans)
        mass = (weights / total).mean(1)
        if max_rows > 1:
            mass = mass * (max_rows / num_rows.clamp(min=1)).index_select(0, spans)
        # a broken block is chosen first, so the output of its request breaks too and the fault is detected
        return mass.masked_fill((unknown & seen).flatten(1).any(1), 1.0)

    def choose(
        self,
        scores: Tensor,
        places: Tensor,
        num_spans: int,
        width: int,
        most: int,
        prepared: Prepared | None = None,
    ) -> Tensor:
        ranked = min(most, width)
        if not num_spans or not ranked:
            return places.new_full((num_spans, most), -1)
        # the last place takes what is not selectable; any candidate is above it
        table = scores.new_full((num_spans * width + 1,), NEG_INF, dtype=torch.float32)
        table = table.index_copy(0, places, scores.float().clamp(min=LOWEST))
        best, order = table[:-1].view(num_spans, width).topk(ranked)
        order = (order + 1) * (best != NEG_INF) - 1
        return order if ranked == most else torch.nn.functional.pad(order, (0, most - ranked), value=-1)

    def keep_or_replace(
        self,
        stored: Tensor,
        fresh: Tensor,
        counts: Tensor,
        modes: Tensor,
        thresholds: Tensor,
        width: int,
        prepared: Prepared | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        both = torch.stack((stored, fresh))
        attended, checked, reused = (
            prepared[3:] if isinstance(prepared, PreparedSpans) else _rules(counts, modes, stored.shape[1])
        )
        valid = attended & (both == both.clamp(0, width - 1))
        # an old block that is equal to a new one is valid if either is
        same = (stored[:, :, None] == fresh[:, None]) & valid[0][:, :, None] & attended[:, None]
        num_valid = valid.sum(2)
        num_old = num_valid[0]
        # a ranking names a block once
        differ = torch.sub(num_valid.sum(0), same.sum((1, 2)), alpha=2)
        kept = checked & (differ <= thresholds) & (num_old >= counts)
        keep = kept | reused
        return fresh + (stored - fresh) * keep[:, None], kept, checked != kept


def _estimates(features: Tensor, boxes: Tensor, first_weight: int) -> Tensor:
    """fp32 [candidates, max_rows, heads]: estimated log-sum-exp of the scores of the block's tokens.

    features: fp32 [candidates, max_rows, heads, features]. boxes: fp32 [candidates, boxes, kv_heads, features].
    """
    count, max_rows, heads, _ = features.shape
    num_boxes, kv_heads = boxes.shape[1:3]
    asked = features.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    found = torch.bmm(asked, boxes.permute(0, 2, 3, 1).flatten(0, 1))
    if num_boxes > 1:
        # the softmax over blocks does not change with what all estimates have in common: the logarithm of the weights
        if first_weight > 1:
            found = torch.cat((found[..., :1] + log(first_weight), found[..., 1:]), -1)
        found = found.logsumexp(-1, keepdim=True)
    return found.view(count, kv_heads, max_rows, -1).transpose(1, 2).reshape(count, max_rows, heads)


def _rows(spans: Tensor, first_rows: Tensor, num_rows: Tensor, max_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `rows`, `seen` and `hidden` of PreparedSpans."""
    if max_rows == 1:
        seen = (num_rows > 0).index_select(0, spans)[:, None, None]
        return first_rows.index_select(0, spans), seen, ~seen
    step = torch.arange(max_rows, device=spans.device)
    rows = first_rows[:, None] + torch.minimum(step, (num_rows - 1).clamp(min=0)[:, None])
    seen = (step < num_rows[:, None]).index_select(0, spans)[:, :, None]
    return rows.index_select(0, spans).flatten(), seen, ~seen


def _rules(counts: Tensor, modes: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `attended`, `checked` and `reused` of PreparedSpans."""
    attended = torch.arange(most, device=counts.device) < counts[:, None]
    return attended, modes == CHECK, modes == REUSE
