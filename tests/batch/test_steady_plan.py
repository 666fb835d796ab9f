"""`SteadyPlanner` returns what `plan_batch` returns, after any history of steps; and it does take the short way."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batch.steady_plan import assert_same
from tests.batch.traffic import Live, Traffic
from vllm_gaudi_ucm.batch import batch_plan as steady_plan
from vllm_gaudi_ucm.batch.batch_plan import MAX_APPENDED, BatchInput, SteadyPlanner, UnifiedPlan, plan_batch
from vllm_gaudi_ucm.batch.steady_rows import SteadyRows
from vllm_gaudi_ucm.batch.window import Window

# seeds, because a history draws more than an example may; a failing one is replayed, not shrunk
RANDOMS = st.integers(0, 1 << 32).map(random.Random)


@settings(max_examples=80)
@given(RANDOMS, st.sampled_from([1, 2, 4, 16]), st.floats(0, 0.4), st.sampled_from([None, Window(9), Window(7, True)]))
def test_any_history_of_steps_gives_the_plans_of_plan_batch(
    rng: random.Random, block_size: int, restlessness: float, window: Window | None
) -> None:
    """Arrivals, chunks, ends, preemption, shared prefixes, lost and exchanged blocks. covers: A1 A3 A5 A7 A8"""
    traffic = Traffic(rng, block_size, restlessness)
    planner = SteadyPlanner(block_size, 3, window=window, rows=SteadyRows)
    for _ in range(25):
        batch = traffic.step()
        expected = plan_batch(batch, block_size, 3, window=window)
        arrays = [*batch[:3], *batch.tables]
        before = [array.copy() for array in arrays]
        plan = planner.plan(batch)
        assert_same(arrays, before, "batch")
        assert_same(plan, expected)


@given(RANDOMS, st.integers(1, 12), st.sampled_from([2, 4, 16]))
def test_a_plan_given_out_stays_as_it_was(rng: random.Random, requests: int, block_size: int) -> None:
    """A step may be computed while the next is planned. covers: A9"""
    traffic = Traffic(rng, block_size, restlessness=0)
    for _ in range(requests):
        traffic.arrive()
    planner = SteadyPlanner(block_size, rows=SteadyRows)
    batches = [traffic.step() for _ in range(12)]
    plans = [planner.plan(batch) for batch in batches]
    for batch, plan in zip(batches, plans, strict=True):
        assert_same(plan, plan_batch(batch, block_size))


@pytest.fixture
def planned_anew(monkeypatch: pytest.MonkeyPatch) -> list[BatchInput]:
    """The batches for which the planner asked `plan_batch`."""
    batches: list[BatchInput] = []

    def counted(batch: BatchInput, *settings: int) -> UnifiedPlan:
        batches.append(batch)
        return plan_batch(batch, *settings)

    monkeypatch.setattr(steady_plan, "plan_batch", counted)
    return batches


def decodes(positions: list[int], block_size: int = 16) -> Traffic:
    """Requests that have computed so many tokens and decode from now on."""
    traffic = Traffic(random.Random(0), block_size, restlessness=0, width=64)
    traffic.live = [Live(computed=position, tokens=position + 1) for position in positions]
    return traffic


def test_a_steady_decode_is_planned_once(planned_anew: list[BatchInput]) -> None:
    """Blocks are appended to one, two and three requests along the way."""
    traffic, planner = decodes([5, 9, 9, 30, 30, 30, 2]), SteadyPlanner(16, rows=SteadyRows)
    for _ in range(40):
        batch = traffic.step()
        assert_same(planner.plan(batch), plan_batch(batch, 16))
    assert len(planned_anew) == 1


def test_batches_that_take_turns_are_planned_once_each(planned_anew: list[BatchInput]) -> None:
    planner = SteadyPlanner(16, batches=2, rows=SteadyRows)
    both = decodes([5, 9, 30]), decodes([17, 40])
    for step in range(20):
        batch = both[step % 2].step()
        assert_same(planner.plan(batch), plan_batch(batch, 16))
    assert len(planned_anew) == 2


def test_a_decode_behind_a_shared_prefix_is_planned_once(planned_anew: list[BatchInput]) -> None:
    traffic, planner = decodes([40, 41, 50]), SteadyPlanner(16, rows=SteadyRows)
    for request in traffic.live:
        request.blocks = [1, 2]
    for _ in range(40):
        batch = traffic.step()
        plan = planner.plan(batch)
        assert plan.shared is not None
        assert_same(plan, plan_batch(batch, 16))
    assert len(planned_anew) == 1


def test_many_blocks_at_once_are_added(planned_anew: list[BatchInput]) -> None:
    traffic, planner = decodes([10] * (MAX_APPENDED + 1)), SteadyPlanner(16, rows=SteadyRows)
    for _ in range(16):
        batch = traffic.step()
        assert_same(planner.plan(batch), plan_batch(batch, 16))
    assert len(planned_anew) == 1


def other_block(batch: BatchInput) -> BatchInput:
    batch.block_tables[1, 0] += 1000
    return batch


def one_behind(batch: BatchInput) -> BatchInput:
    batch.num_computed[1] -= 1
    return batch


def a_chunk(batch: BatchInput) -> BatchInput:
    batch.num_scheduled[1] += 1
    return batch


def no_last_token(batch: BatchInput) -> BatchInput:
    batch.num_tokens[1] += 1
    return batch


def one_gone(batch: BatchInput) -> BatchInput:
    return batch.take(np.arange(len(batch.num_computed) - 1))


def two_exchanged(batch: BatchInput) -> BatchInput:
    order = [1, 0, *range(2, len(batch.num_computed))]
    return batch.take(np.array(order))


CHANGES = [other_block, a_chunk, one_gone, two_exchanged]


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_does_not_continue_the_last_is_planned_anew(
    change: Callable[[BatchInput], BatchInput], planned_anew: list[BatchInput]
) -> None:
    """covers: A3 A8"""
    traffic, planner = decodes([3, 20, 21]), SteadyPlanner(16, rows=SteadyRows)
    for _ in range(3):
        planner.plan(traffic.step())
    batch = change(traffic.step())
    assert_same(planner.plan(batch), plan_batch(batch, 16))
    assert planned_anew[1:] == [batch]


@pytest.mark.parametrize("change", [one_behind, no_last_token])
def test_a_decode_is_moved_by_any_number_of_tokens(
    change: Callable[[BatchInput], BatchInput], planned_anew: list[BatchInput]
) -> None:
    """The later passes of a draft model go on where the accepted drafts end; a row may yield no token."""
    traffic, planner = decodes([3, 20, 21]), SteadyPlanner(16, rows=SteadyRows)
    for _ in range(3):
        planner.plan(traffic.step())
    for _ in range(2):
        batch = change(traffic.step())
        assert_same(planner.plan(batch), plan_batch(batch, 16))
    assert len(planned_anew) == 1


def test_an_appended_block_that_another_request_has_is_shared() -> None:
    traffic, planner = decodes([14, 20, 21]), SteadyPlanner(16, rows=SteadyRows)
    for _ in range(2):
        planner.plan(traffic.step())
    first, second, _ = traffic.live
    first.blocks.append(second.blocks[0])
    batch = traffic.step()
    plan = planner.plan(batch)
    assert plan.shared is not None
    assert_same(plan, plan_batch(batch, 16))


def test_the_arrays_of_a_batch_may_be_used_again() -> None:
    """The next step is written into the arrays of the last."""
    traffic, planner = decodes([3, 20, 21]), SteadyPlanner(16, rows=SteadyRows)
    batch = traffic.step()
    planner.plan(batch)
    later = other_block(traffic.step())
    for array, after in zip((*batch[:3], *batch.tables), (*later[:3], *later.tables), strict=True):
        array[...] = after
    assert_same(planner.plan(batch), plan_batch(batch, 16))


def test_an_error_of_a_step_does_not_spoil_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes after the planner has taken note of an appended block."""
    traffic, planner = decodes([3, 14]), SteadyPlanner(16, rows=SteadyRows)
    for _ in range(2):
        planner.plan(traffic.step())
    batch = traffic.step()
    bad = other_block(batch._replace(tables=(batch.block_tables.copy(),)))

    def out_of_memory(*_: object) -> UnifiedPlan:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(steady_plan, "plan_batch", out_of_memory)
        with pytest.raises(MemoryError):
            planner.plan(bad)
    assert_same(planner.plan(batch), plan_batch(batch, 16))
