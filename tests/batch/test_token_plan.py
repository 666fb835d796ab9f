"""`plan_batch` with a slot for each token: the oracle of blocks, and blocks themselves where slots are contiguous."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings

from tests.batch.batches import Request, Step, steps
from tests.batch.expand import expand, expected, owners
from tests.batch.token_steps import TokenStep, by_token, token_steps
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan, plan_batch


@settings(max_examples=200)
@given(token_steps())
def test_each_row_sees_each_position_of_its_request_once(step: TokenStep) -> None:
    """covers: A1 A2 A3 A5"""
    plan = plan_batch(step.batch_input(), step.block_size)
    assert expand(plan, step) == expected(plan, step)


@given(token_steps())
def test_rows_positions_and_slots(step: TokenStep) -> None:
    plan = plan_batch(step.batch_input(), step.block_size)
    rows = owners(plan, step)
    assert plan.positions.tolist() == [position for _, position in rows]
    places = [step.place(*row) for row in rows]
    assert plan.slots.tolist() == [tile * step.block_size + offset for tile, offset in places]


@given(token_steps())
def test_an_entry_is_a_range_of_one_tile_and_no_row_has_it_twice(step: TokenStep) -> None:
    plan = plan_batch(step.batch_input(), step.block_size)
    if plan.unique is not None:
        assert (plan.unique.lo < plan.unique.hi).all()
        assert (plan.unique.hi <= step.block_size).all()
        assert (plan.unique.blocks >= 1).all()
        entries = Counter(zip(plan.unique.rows.tolist(), plan.unique.blocks.tolist(), plan.unique.lo, strict=True))
        assert max(entries.values()) == 1
    if plan.shared is not None:
        used = plan.shared.hi > 0
        assert used.any(axis=0).all()
        assert (plan.shared.lo < plan.shared.hi)[used].all()
        assert (plan.shared.hi <= step.block_size).all()


@settings(max_examples=100)
@given(steps())
def test_contiguous_slots_are_planned_as_blocks(step: Step) -> None:
    """covers: A13 A14"""
    assert_equal_plans(
        plan_batch(by_token(step).batch_input(), step.block_size), plan_batch(step.batch_input(), step.block_size)
    )


def assert_equal_plans(found: UnifiedPlan, wanted: UnifiedPlan) -> None:
    assert (found.shared is None, found.unique is None) == (wanted.shared is None, wanted.unique is None)
    for name in ("requests", "query_start", "row_requests", "positions", "slots", "logits_requests", "logits_rows"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    if found.unique is not None and wanted.unique is not None:
        for one, other in zip(found.unique[:4], wanted.unique[:4], strict=True):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
    if found.shared is not None and wanted.shared is not None:
        for one, other in zip(found.shared[:3], wanted.shared[:3], strict=True):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
        assert [(rows.tolist(), *bounds) for rows, *bounds in found.shared.groups] == [
            (rows.tolist(), *bounds) for rows, *bounds in wanted.shared.groups
        ]


def test_two_decodes_share_a_prefix_that_ends_inside_a_tile() -> None:
    """The tile in which they part is shared, too: they begin it at the same slot."""
    common = list(range(1, 21))
    tables = [[*common, *range(21, 31)], [*common, *range(101, 109)]]
    step = TokenStep([Request(29, 1), Request(27, 1)], tables, 16, 10)
    plan = plan_batch(step.batch_input(), 16)
    assert plan.shared is not None
    assert plan.unique is not None
    assert plan.shared.blocks.tolist() == [1, 2]
    assert plan.shared.hi.tolist() == [[16, 14], [16, 4]]
    assert plan.unique.rows.tolist() == [1]
    assert (plan.unique.lo.tolist(), plan.unique.hi.tolist()) == ([4], [12])


def test_scattered_slots_cost_entries_only() -> None:
    step = TokenStep([Request(9, 1)], [[3, 9, 4, 5, 30, 29, 28, 1, 2, 50]], 16, 5)
    plan = plan_batch(step.batch_input(), 16)
    assert plan.unique is not None
    # 3 / 9 / 4 5 / 30 29 28 / 1 2 / 50
    assert plan.unique.blocks.tolist() == [1, 1, 1, 2, 1, 4]
    assert plan.unique.lo.tolist() == [2, 8, 3, 11, 0, 1]
    assert plan.unique.hi.tolist() == [3, 9, 5, 14, 2, 2]


def test_parts_of_a_batch() -> None:
    tables = [[1, 2, 3], [9, 7], [4, 5, 6]]
    batch = TokenStep([Request(2, 1), Request(1, 1), Request(0, 3)], tables, 4, 4).batch_input()
    assert batch.has_token_tables
    part: BatchInput = batch.take(np.array([2, 1]))
    plan = plan_batch(part, 4)
    assert plan.slots.tolist() == [10, 7, 8, 9]
