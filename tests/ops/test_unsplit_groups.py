"""Native attention whose requests read blocks of some shared groups for themselves: the same results, other passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.batch import Batch, Request, Shape, build, requests_strategy, sparse_requests_strategy
from tests.ops.oracle import budget, oracle
from vllm_gaudi_ucm.ops.native.library import native, why_not_native
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.impl.native_jobs import make_jobs

pytestmark = pytest.mark.skipif(native() is None, reason=why_not_native())

BLOCK = 4
SHARING = [Request(9, 1, prefix=2), Request(12, 1, prefix=3), Request(8, 7, prefix=2), Request(12, 3, prefix=3)]


def assert_exact(batch: Batch, unsplit: set[int]) -> None:
    ready = prepare(batch.parts, BLOCK, implementation="native", unsplit=unsplit)
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    out = unified_attention(*tensors, ready, batch.scale).double()
    expected = oracle(batch)
    allowed = budget(batch, expected)
    for row, seen in enumerate(batch.seen):
        if seen is None:
            assert not out[row].any(), f"row {row} sees nothing"
        else:
            torch.testing.assert_close(out[row], torch.from_numpy(expected[row]), atol=allowed, rtol=0)


def num_groups(batch: Batch) -> int:
    return 0 if batch.parts.shared is None else len(batch.parts.shared.groups)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.one_of(requests_strategy(BLOCK), sparse_requests_strategy(BLOCK)),
    chosen=st.sets(st.integers(0, 20)),
    loose=st.booleans(),
)
def test_any_groups_unsplit_equal_the_oracle(requests: list[Request], chosen: set[int], loose: bool) -> None:
    """covers: A1, A19, A20, A22. Caches hold NaN wherever no row may look."""
    batch = build(requests, Shape(block_size=BLOCK, loose=loose))
    assert_exact(batch, {index for index in chosen if index < num_groups(batch)})


def test_unsplit_requests_have_one_pass_each() -> None:
    """covers: A22. Nothing is left to merge, and each (row, token) pair is still there once."""
    batch = build(SHARING, Shape(block_size=BLOCK))
    split, unsplit = (make_jobs(batch.parts, BLOCK, groups) for groups in ((), range(num_groups(batch))))
    assert (len(unsplit.jobs), unsplit.partials) == (len(SHARING), 0)
    assert split.partials > 0

    def pairs(jobs: object) -> int:
        table, spans = jobs.jobs.tolist(), jobs.spans  # type: ignore[attr-defined]
        return sum(
            (row[1] - row[0]) * int((spans[row[2] : row[3], 2] - spans[row[2] : row[3], 1]).sum()) for row in table
        )

    assert pairs(split) == pairs(unsplit)


def test_only_native_and_only_groups_that_are_there() -> None:
    """covers: A18"""
    parts = build(SHARING, Shape(block_size=BLOCK)).parts
    with pytest.raises(ValueError, match="unsplit shared groups are for implementation 'native', got 'cpu'"):
        prepare(parts, BLOCK, implementation="cpu", unsplit={0})
    with pytest.raises(ValueError, match="unsplit names shared group 99, the parts have"):
        prepare(parts, BLOCK, implementation="native", unsplit={99})
