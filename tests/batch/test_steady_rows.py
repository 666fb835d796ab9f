"""`SteadyPlanner` moves verifications and sparse decodes, and returns what `plan_batch` returns for each count of
accepted drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batch.steady_plan import assert_same
from tests.batch.verifications import Verifications
from vllm_gaudi_ucm.batch import batch_plan as planning
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, SteadyPlanner, UnifiedPlan, plan_batch
from vllm_gaudi_ucm.batch.selection_plan import SelectionInput
from vllm_gaudi_ucm.batch.steady_rows import SteadyRows

# seeds, because a history draws more than an example may; a failing one is replayed, not shrunk
RANDOMS = st.integers(0, 1 << 32).map(random.Random)
Step = tuple[BatchInput, SelectionInput | None]


@settings(max_examples=60)
@given(
    RANDOMS,
    st.sampled_from([2, 4, 16]),
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.integers(0, 3),
    st.booleans(),
)
def test_plans_equal_plans_made_anew(
    rng: random.Random, block_size: int, drafts: list[int], prefix: int, choosing: bool
) -> None:
    """Any drafts are accepted, blocks begin, and choices change from time to time. Earlier plans stay as they were."""
    steps = Verifications(rng, block_size, drafts, prefix=prefix, choosing=choosing)
    planner = SteadyPlanner(block_size, 3, rows=SteadyRows)
    given_out: list[tuple[UnifiedPlan, UnifiedPlan]] = []
    while not steps.is_over and len(given_out) < 40:
        batch, selection = steps.step()
        given_out.append((planner.plan(batch, selection), plan_batch(batch, block_size, 3, selection)))
        assert_same(*given_out[-1])
    for found, expected in given_out:
        assert_same(found, expected)


@pytest.fixture
def planned_anew(monkeypatch: pytest.MonkeyPatch) -> list[BatchInput]:
    """The batches for which the planner called `plan_batch`."""
    batches: list[BatchInput] = []

    def counted(batch: BatchInput, *others: object) -> UnifiedPlan:
        batches.append(batch)
        return plan_batch(batch, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "plan_batch", counted)
    return batches


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("drafts", [[4, 4, 4], [0, 4, 0, 2]])
def test_dense_verifications_are_planned_once(planned_anew: list[BatchInput], drafts: list[int], prefix: int) -> None:
    """Every request begins several blocks along the way."""
    steps, planner = Verifications(random.Random(0), 16, drafts, prefix=prefix), SteadyPlanner(16, rows=SteadyRows)
    for _ in range(40):
        planner.plan(*steps.step())
    assert len(planned_anew) == 1


@pytest.mark.parametrize("drafts", [[4, 4, 4], [0, 0, 0]])
def test_steps_with_a_choice_are_planned_when_it_changes(planned_anew: list[BatchInput], drafts: list[int]) -> None:
    """The mode of a choice may change, the blocks among which it is made may not."""
    steps, planner = Verifications(random.Random(1), 16, drafts, choosing=True), SteadyPlanner(16, rows=SteadyRows)
    before, changes = None, 0
    for _ in range(40):
        batch, selection = steps.step()
        assert selection is not None
        chosen = [row.nonzero()[0].tolist() for row in selection.candidates]
        changes += chosen != before
        before = chosen
        planner.plan(batch, selection)
    assert len(planned_anew) == changes < 15


def one_row_more(batch: BatchInput, selection: SelectionInput | None) -> Step:
    batch.num_scheduled[1] += 1
    return batch, selection


def another_block(batch: BatchInput, selection: SelectionInput | None) -> Step:
    batch.block_tables[1, 0] += 1000
    return batch, selection


def fewer_tokens(batch: BatchInput, selection: SelectionInput | None) -> Step:
    batch.num_computed[1] -= 16
    return batch, selection


def one_gone(batch: BatchInput, selection: SelectionInput | None) -> Step:
    index = np.arange(2)
    return batch.take(index), None if selection is None else selection.take(index)


def shared_last_block(batch: BatchInput, selection: SelectionInput | None) -> Step:
    last = (batch.num_computed[:2] - 1) // 16
    batch.block_tables[0, last[0]] = batch.block_tables[1, last[1]]
    return batch, selection


def dense(batch: BatchInput, selection: SelectionInput | None) -> Step:
    return batch, None


def another_count(batch: BatchInput, selection: SelectionInput | None) -> Step:
    assert selection is not None
    return batch, selection._replace(counts=np.minimum(selection.counts, 1))


def in_tiles(batch: BatchInput, selection: SelectionInput | None) -> Step:
    assert selection is not None
    return batch, selection.in_tiles(np.array([0]), np.array([2]), 1)


CHANGES = [one_row_more, another_block, fewer_tokens, one_gone, shared_last_block, dense, another_count, in_tiles]


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_does_not_continue_the_previous_one_is_planned_anew(
    change: Callable[[BatchInput, SelectionInput | None], Step], planned_anew: list[BatchInput]
) -> None:
    steps, planner = (
        Verifications(random.Random(2), 16, [4, 4, 3], prefix=4, choosing=True),
        SteadyPlanner(16, rows=SteadyRows),
    )
    for _ in range(3):
        planner.plan(*steps.step())
    before = len(planned_anew)
    for _ in range(2):
        changed = change(*steps.step())
        assert_same(planner.plan(*changed), plan_batch(changed[0], 16, 512, changed[1]))
    assert len(planned_anew) > before


def test_large_tables_of_ranges_are_not_copied(planned_anew: list[BatchInput], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan made anew does not write what it does not use."""
    monkeypatch.setattr(planning, "MOST_MOVED", 3)
    steps, planner = Verifications(random.Random(0), 16, [4, 4]), SteadyPlanner(16, rows=SteadyRows)
    for _ in range(3):
        planner.plan(*steps.step())
    assert len(planned_anew) == 3
