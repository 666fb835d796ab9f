"""Padding a step to the sizes of a bucket never changes what a real row gets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.batch import Batch, Request, Shape, build, requests_strategy
from tests.ops.oracle import IMPLEMENTATIONS, assert_matches, attend, budget, examples, oracle
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    CausalSlice,
    SelectedPart,
    SharedGroup,
    SharedPart,
    UniquePart,
)

pytestmark = pytest.mark.slow  # many batches through every implementation

# What may lie in padded rows, in the dummy block and in every other place that no row uses.
CONTENTS = (0.0, -3.5, 1e4, math.inf, -math.inf, math.nan)
MIXED = [Request(9, 1, prefix=2), Request(12, 1, prefix=3), Request(0, 1), Request(8, 7, prefix=2), Request(0, 11)]


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


@st.composite
def pads_strategy(draw: st.DrawFn) -> Pads:
    rows, shared, unique, spans, singles = (draw(st.integers(0, 9)) for _ in range(5))
    phase = "".join(draw(st.sampled_from([part, "-"])) for part in "csu")
    return Pads(rows, shared, unique, spans, singles, draw(st.sampled_from([1, 3, 8, 512])), phase)


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


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@given(
    requests_strategy(block_size=4),
    pads_strategy(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 10_000),
)
@settings(max_examples=120, derandomize=True)
def test_contents_of_pads_never_reach_a_row(
    requests: list[Request], pads: Pads, contiguous: bool, dtype: torch.dtype, seed: int
) -> None:
    """covers: A9, A10, A11. At equal shapes every row is the same to the last bit, and pads are zeros."""
    expected = None
    for content in CONTENTS:
        shape = Shape(poison=content, pads=0, contiguous=contiguous, dtype=dtype, seed=seed)
        batch = pad(build(requests, shape), pads, content)
        out = attend(batch, "reference")
        assert not out[out.shape[0] - pads.rows :].any(), "a padded row sees nothing"
        if expected is None:
            expected = out
        assert torch.equal(_bits(out), _bits(expected)), f"pads full of {content} changed a row"


def test_random_contents_of_pads_never_reach_a_row() -> None:
    """covers: A9. Garbage as it is in practice: another value in every place."""
    pads = Pads(rows=7, shared=3, unique=6, spans=2, singles=5, slice=8)
    plain = pad(build(MIXED, Shape(pads=0, poison=0.0)), pads, 0.0)
    marked = build(MIXED, Shape(pads=0, poison=math.nan))
    expected = attend(plain, "reference")
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        batch = pad(marked, pads, math.nan)
        for name in ("query", "key", "value", "key_cache", "value_cache"):
            tensor = getattr(batch, name)
            garbage = torch.randn(tensor.shape, generator=random) * 10 ** (seed % 9)
            setattr(batch, name, torch.where(tensor.isnan(), garbage, tensor))
        assert torch.equal(_bits(attend(batch, "reference")), _bits(expected))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(
    requests_strategy(block_size=4),
    pads_strategy(),
    st.booleans(),
    st.sampled_from(CONTENTS),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 10_000),
)
@settings(max_examples=examples(100), derandomize=True)
def test_padded_equals_unpadded(
    implementation: str,
    requests: list[Request],
    pads: Pads,
    contiguous: bool,
    content: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """covers: A9, A10, A11, B1. Other shapes may sum in another order: within the error of a plain softmax."""
    plain = build(requests, Shape(poison=content, pads=0, contiguous=contiguous, dtype=dtype, seed=seed))
    padded = pad(plain, pads, content)
    assert_matches(padded, implementation)
    rows = plain.query.shape[0]
    difference = (attend(padded, implementation)[:rows] - attend(plain, implementation)).double().numpy()
    assert np.abs(difference).max(initial=0.0) <= budget(plain, oracle(plain))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("phase", ["csu", "cs-", "-su", "--u", "c--", "-s-"])
def test_a_step_in_a_bucket_of_more_phases(implementation: str, phase: str) -> None:
    """covers: B4. A part that the step does not have runs over empty ranges, also where nothing else is there."""
    pads = Pads(rows=3, shared=4, unique=5, spans=1, singles=2, phase=phase)
    for requests in ([], [Request(0, 1)], [Request(0, 6)], [Request(4, 1, prefix=1), Request(7, 1, prefix=1)], MIXED):
        assert_matches(pad(build(requests, Shape(pads=0)), pads, math.nan), implementation, prepared=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pads_of_more_than_one_tile(implementation: str) -> None:
    """covers: A13, A14. Thousands of pads of every kind, longer than any tile of any implementation."""
    pads = Pads(rows=900, shared=1200, unique=9000, spans=30, singles=300, slice=512)
    assert_matches(pad(build(MIXED, Shape(pads=0, heads=2, kv_heads=1)), pads, math.nan), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_broken_token_stays_visible_in_a_padded_step(implementation: str) -> None:
    """covers: A9. Masking pads must not mask a request's own NaN."""
    batch = build(MIXED, Shape(pads=0, poison=1e4))
    last = batch.first_row[-1] + MIXED[-1].new - 1
    batch.value[last] = math.nan
    out = attend(pad(batch, Pads(rows=5, shared=2, unique=3, singles=4, slice=8), math.nan), implementation)
    assert out[last].isnan().all()
    assert out[:last].isfinite().all()
    assert not out[last + 1 :].any()
