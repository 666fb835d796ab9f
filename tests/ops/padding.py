"""Helpers of `test_padding.py` that other tests use, too."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.ops.batch import Batch
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    CausalSlice,
    SelectedPart,
    SharedGroup,
    SharedPart,
    UniquePart,
)


@dataclass(frozen=True)
class Pads:
    """How much larger the bucket is than the step. phase: parts that the bucket has, also where the step has none.

    A part that only the bucket has is of one block at least.
    """

    rows: int = 0
    shared: int = 0
    unique: int = 0
    spans: int = 0
    singles: int = 0
    slice: int = 512
    phase: str = "---"


def pad(batch: Batch, pads: Pads, content: float) -> Batch:
    """The batch in a bucket: static sizes, pads at row 0, at the dummy block 0 and at a last span that sees nothing."""
    total = batch.query.shape[0] + pads.rows
    tensors = [_rows(tensor, pads.rows, content) for tensor in (batch.query, batch.key, batch.value)]
    query, key, value = tensors
    causal, shared, unique, selected, _ = batch.parts
    parts = AttentionParts(
        _pad_causal(causal, total, pads) if causal or "c" in pads.phase else None,
        _pad_shared(shared, total, len(batch.requests), pads) if shared or "s" in pads.phase else None,
        _pad_unique(unique, total, pads) if unique or "u" in pads.phase else None,
        None if selected is None else _pad_selected(selected, pads),
    )
    seen = batch.seen + [None] * pads.rows
    return replace(batch, query=query, key=key, value=value, parts=parts, seen=seen)


def _rows(tensor: Tensor, count: int, content: float) -> Tensor:
    return torch.cat([tensor, tensor.new_full((count, *tensor.shape[1:]), content)])


def _append(tensor: Tensor, count: int, content: int) -> Tensor:
    return torch.cat([tensor, tensor.new_full((count,), content)])


def _pad_selected(part: SelectedPart, pads: Pads) -> SelectedPart:
    """Entries of a last span that has no rows."""
    last = part.first_rows.shape[0]
    return part._replace(
        blocks=_append(part.blocks, pads.unique, 0),
        spans=_append(part.spans, pads.unique, last),
        hi=_append(part.hi, pads.unique, 0),
        first_rows=_append(part.first_rows, 1, 0),
        num_rows=_append(part.num_rows, 1, 0),
    )


def _pad_causal(part: CausalPart | None, total: int, pads: Pads) -> CausalPart:
    groups = torch.empty(0, dtype=torch.int32) if part is None else part.groups
    ends = [(lo, min(lo + pads.slice, total)) for lo in range(0, total, pads.slice)]
    return CausalPart(
        _append(groups, total - groups.shape[0], -1), tuple(CausalSlice(lo, hi, 0, hi) for lo, hi in ends)
    )


def _pad_shared(part: SharedPart | None, total: int, spans: int, pads: Pads) -> SharedPart:
    if part is None:
        nothing = torch.zeros(spans, 0, dtype=torch.int32)
        part = SharedPart(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), nothing, nothing, ())
    more = max(pads.shared, int(not len(part.blocks)))
    columns = part.blocks.shape[0] + more
    last = part.hi.shape[0] + pads.spans
    lo, hi = torch.zeros(2, last + 1, columns, dtype=torch.int32)
    hi[: part.hi.shape[0], : part.hi.shape[1]] = part.hi
    row_spans = _append(part.row_spans, total - part.row_spans.shape[0], last)
    everything = (SharedGroup(torch.arange(total), 0, columns),)
    return SharedPart(_append(part.blocks, more, 0), row_spans, lo, hi, everything)


def _pad_unique(part: UniquePart | None, total: int, pads: Pads) -> UniquePart:
    if part is None:
        ids, ends = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
        part = UniquePart(ids, ids, ends, ends, 0)
    # A contiguous slice of the whole cache has no room for more, and without rows there is none to point at.
    more = max(pads.unique, int(not len(part.rows))) if total and part.blocks is not None else 0
    blocks = None if part.blocks is None else _append(part.blocks, more, 0)
    rows, lo, hi = (_append(tensor, more, 0) for tensor in (part.rows, part.lo, part.hi))
    return UniquePart(blocks, rows, lo, hi, min(max(1, part.num_rows + pads.singles), total))
