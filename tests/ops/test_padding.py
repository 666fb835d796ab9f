"""Padding a step to the sizes of a bucket never changes what a real row gets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.batch import Request, Shape, build, requests_strategy
from tests.ops.oracle import IMPLEMENTATIONS, assert_matches, attend, budget, examples, oracle
from tests.ops.padding import Pads, pad

pytestmark = pytest.mark.slow  # many batches through every implementation

# What may lie in padded rows, in the dummy block and in every other place that no row uses.
CONTENTS = (0.0, -3.5, 1e4, math.inf, -math.inf, math.nan)
MIXED = [Request(9, 1, prefix=2), Request(12, 1, prefix=3), Request(0, 1), Request(8, 7, prefix=2), Request(0, 11)]


@st.composite
def pads_strategy(draw: st.DrawFn) -> Pads:
    rows, shared, unique, spans, singles = (draw(st.integers(0, 9)) for _ in range(5))
    phase = "".join(draw(st.sampled_from([part, "-"])) for part in "csu")
    return Pads(rows, shared, unique, spans, singles, draw(st.sampled_from([1, 3, 8, 512])), phase)


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
