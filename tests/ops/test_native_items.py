"""Items of the C++ kernel: what they cover, and how much work it is to make them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning import Workload
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.execution.true_shape_tensors import TrueShapeTensors
from vllm_gaudi_ucm.ops.unified_attention.impl.cpu.native_jobs import JobItem, make_items, make_jobs
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, SharedGroup, SharedPart, UniquePart

BLOCK = 4
Pairs = Counter[tuple[int, int, int]]


@st.composite
def cached_parts(draw: st.DrawFn) -> AttentionParts:
    """Any ranges, rows of a group in any order, groups without rows or without blocks."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    spans, blocks, rows = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 9))
    lo = torch.randint(-1, 2, (spans, blocks), generator=seed, dtype=torch.int32)
    hi = torch.randint(0, BLOCK + 2, (spans, blocks), generator=seed, dtype=torch.int32)
    if draw(st.booleans()):  # as it mostly is: all see the same
        lo[:], hi[:] = lo[:1], hi[:1]
    cuts = [0, *sorted(draw(st.lists(st.integers(0, blocks), max_size=3))), blocks]
    groups = []
    for first, last in pairwise(cuts):
        order = torch.randperm(rows, generator=seed)
        groups.append(SharedGroup(order[: draw(st.integers(0, rows))], first, last))
    of_rows = torch.randint(0, spans, (rows,), generator=seed)
    shared = SharedPart(torch.randperm(blocks, generator=seed), of_rows, lo, hi, tuple(groups))
    entries = draw(st.integers(0, 8))
    own = torch.randint(0, BLOCK + 1, (2, entries), generator=seed, dtype=torch.int32)
    unique = UniquePart(None, torch.randint(0, rows, (entries,), generator=seed), own[0], own[1], rows)
    return AttentionParts(None, shared, unique)


def pairs_of_parts(parts: AttentionParts) -> Pairs:
    """How often a row sees a token of a block, by the definition of the parts."""
    pairs: Pairs = Counter()
    shared, unique = parts.shared, parts.unique
    assert shared is not None
    assert unique is not None
    for group in shared.groups:
        for row in group.rows.tolist():
            for column in range(group.block_lo, group.block_hi):
                span = int(shared.row_spans[row])
                for token in range(max(0, int(shared.lo[span, column])), min(BLOCK, int(shared.hi[span, column]))):
                    pairs[row, int(shared.blocks[column]), token] += 1
    for block, row in enumerate(unique.rows.tolist()):
        for token in range(int(unique.lo[block]), int(unique.hi[block])):
            pairs[row, block, token] += 1
    return pairs


def pairs_of_items(items: list[JobItem]) -> Pairs:
    pairs: Pairs = Counter()
    for item in items:
        assert len(item.ranges)
        for row in item.rows.tolist():
            for block, low, high, _, _ in item.ranges.tolist():
                for token in range(low, high):
                    pairs[row, block, token] += 1
    return pairs


@settings(max_examples=150, deadline=None)
@given(cached_parts())
def test_items_cover_what_the_parts_say(parts: AttentionParts) -> None:
    """covers: A1, A5, A13."""
    assert parts.shared is not None
    assert pairs_of_items(make_items(parts, BLOCK)) == pairs_of_parts(parts)


def parts_of(workload: Workload) -> AttentionParts:
    plan = workload.planner()(next(workload.steps(1)))
    return TrueShapeTensors(torch.device("cpu")).stage(PlannedStep.of_tokens(plan, plan.positions))[0].parts


def calls_in(action: Callable[[], Any]) -> int:
    """Functions called, Python's and C's: what a step costs beyond its arrays, whatever else the machine does."""
    count = 0

    def counted(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("rows", "chunk"), [(1, None), (4, None), (1, 512)])
@pytest.mark.parametrize("prefix", [0, 2048])
def test_the_work_of_planning_does_not_grow_with_the_number_of_blocks(
    rows: int, chunk: int | None, prefix: int
) -> None:
    """Decodes, verifications or a chunk at 4K, in blocks of 16 as in blocks of 128: eight times the blocks."""
    calls = []
    for size in (128, 16):
        parts = parts_of(Workload("", 12, 4096, prefix, rows=rows, chunk=chunk, block_size=size))
        calls.append(calls_in(lambda parts=parts, size=size: make_jobs(parts, size)))  # type: ignore[misc]
    assert calls[1] <= 1.2 * calls[0]


@pytest.mark.parametrize("size", [16, 128])
def test_the_work_of_a_group_is_small(size: int) -> None:
    """16 more verifications of 4 rows are not hundreds of calls more each."""
    calls = []
    for requests in (16, 32):
        parts = parts_of(Workload("", requests, 8192, rows=4, block_size=size))
        calls.append(calls_in(lambda parts=parts: make_items(parts, size)))  # type: ignore[misc]
    assert calls[1] - calls[0] <= 16 * 40
