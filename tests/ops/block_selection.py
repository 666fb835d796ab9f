"""Helpers of `test_block_selection.py` that other tests use, too."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.ops.selection import Case

COMMON = settings(deadline=None, derandomize=True, max_examples=30, suppress_health_check=list(HealthCheck))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    span = st.tuples(st.sampled_from([1, 1, 2, 4]), st.integers(0, 9))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Case(
        spans=tuple(draw(st.lists(span, min_size=1, max_size=5))),
        before=draw(st.integers(0, 2)),
        heads=kv_heads * draw(st.sampled_from([1, 3, 4])),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([8, 12, 16])),
        block_size=draw(st.sampled_from([1, 3, 8, 16])),
        pads=draw(st.integers(0, 3)),
        poison=draw(st.sampled_from([float("nan"), float("inf"), 1e4])),
        seed=draw(st.integers(0, 10_000)),
    )


def assert_scores(found: torch.Tensor, expected: np.ndarray) -> None:
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.double().numpy(), expected, atol=2e-5, rtol=2e-4)
