"""Helpers of `test_unified_attention.py` that other tests use, too."""

from __future__ import annotations

from typing import get_args

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.ops.batch import Memory, Request, Shape

COMMON = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


# Each line is a way of laying out a step that was wrong somewhere once.
MIXED = [
    Request(9, 1, prefix=2),
    Request(12, 1, prefix=3),
    Request(0, 1),
    Request(8, 7, prefix=2),
    Request(5, 3, family=1, prefix=1),
    Request(0, 11),
    Request(14, 4),
    Request(3, 1),
]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Shape(
        heads=kv_heads * draw(st.sampled_from([1, 3, 4])),
        kv_heads=kv_heads,
        poison=draw(st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e4])),
        pads=draw(st.integers(0, 3)),
        contiguous=draw(st.booleans()),
        loose=draw(st.booleans()),
        memory=draw(st.sampled_from(get_args(Memory))),
        seed=draw(st.integers(0, 10_000)),
    )
