"""Steps with more shared blocks, or ranges, than the largest bucket: divided into steps that fit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.batch.batches import Request, Step, lay_out, steps
from tests.batch.token_steps import TokenStep, token_steps
from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan, plan_batch
from vllm_gaudi_ucm.batch.block_use import Room
from vllm_gaudi_ucm.batch.division import divide_batch
from vllm_gaudi_ucm.batch.window import Window


def divided(
    step: Step, most: int, alone: list[int] | None = None, ranges: int = 0, window: Window | None = None
) -> list[list[int]]:
    room, batch = Room(most, ranges), step.batch_input()
    return [group.tolist() for group in divide_batch(batch, step.block_size, room, alone or (), window)]


def plan_of(step: Step, group: list[int], window: Window | None = None) -> UnifiedPlan:
    """The plan of these requests alone."""
    return plan_batch(step.batch_input().take(np.array(group, np.int64)), step.block_size, window=window)


def planned(step: Step, group: list[int], window: Window | None = None) -> int:
    """Shared blocks of that."""
    plan = plan_of(step, group, window)
    return 0 if plan.shared is None else len(plan.shared.blocks)


def ranges_of(step: Step, group: list[int]) -> int:
    """Shared and unique ones."""
    unique = plan_of(step, group).unique
    return planned(step, group) + (0 if unique is None else len(unique.blocks))


def least(step: Step) -> int:
    """What `Limits` demands: the blocks of the longest request."""
    return max((len(table) for table in step.tables), default=1)


@given(step=steps(), data=st.data())
def test_every_request_is_in_one_group_in_order_and_every_group_fits(step: Step, data: st.DataObject) -> None:
    """covers: B1 B3"""
    most = data.draw(st.integers(least(step), least(step) + 12))
    groups = divided(step, most)
    assert [index for group in groups for index in group] == list(range(len(step.requests)))
    for group in groups:
        assert planned(step, group) <= most


@given(step=steps(), data=st.data())
def test_a_group_ends_only_where_the_next_request_does_not_fit(step: Step, data: st.DataObject) -> None:
    """So a step that fits is one group, and every division has a reason. Blocks before a window take no room."""
    most = data.draw(st.integers(least(step), least(step) + 12))
    window = data.draw(st.none() | st.builds(Window, st.integers(1, 40), st.booleans(), st.just(False)))
    groups = divided(step, most, window=window)
    for group, following in pairwise(groups):
        assert planned(step, [*group, following[0]], window) > most
    assert all(planned(step, group, window) <= most for group in groups)


def test_contexts_of_single_rows_do_not_divide_a_step() -> None:
    """Sixty decodes with long contexts of their own beside three prompts with a context: two steps, not dozens."""
    requests = [*(Request(99, 1) for _ in range(60)), *(Request(80, 8) for _ in range(3))]
    assert divided(lay_out(requests, 4, 0), 50) == [[*range(62)], [62]]


def test_decodes_with_one_prefix_count_it_once() -> None:
    requests = [Request(3 * 4 + own, 1, prefix=3) for own in range(40)]
    assert divided(lay_out(requests, 4, 0), 6) == [[*range(40)]]


def test_an_empty_step_is_one_group() -> None:
    assert divided(lay_out([], 4, 0), 1) == [[]]


@given(step=steps(), data=st.data())
def test_some_run_alone_and_the_others_in_order(step: Step, data: st.DataObject) -> None:
    """A request may find what one before it fills in the same step, so nobody moves past another."""
    count = len(step.requests)
    most = data.draw(st.integers(least(step), least(step) + 12))
    alone = data.draw(st.lists(st.integers(0, count - 1), unique=True)) if count else []
    groups = divided(step, most, alone)
    assert [index for group in groups for index in group] == list(range(count))
    for group in groups:
        assert planned(step, group) <= most
        assert len(group) == 1 or not set(group) & set(alone)
    for group, following in pairwise(groups):
        apart = {group[0], following[0]} & set(alone)
        assert apart or planned(step, [*group, following[0]]) > most


def test_neighbours_that_run_alone() -> None:
    requests = [Request(9, 1), Request(9, 1), Request(20, 5), Request(20, 5), Request(9, 1)]
    assert divided(lay_out(requests, 4, 0), 50, [2, 3]) == [[0, 1], [2], [3], [4]]


@given(step=token_steps(), data=st.data())
def test_scattered_slots_are_divided_by_their_ranges(step: TokenStep, data: st.DataObject) -> None:
    """Those of one request always fit; a group ends only where the next request does not."""
    count = len(step.requests)
    least = max((ranges_of(step, [index]) for index in range(count)), default=1)
    most, ranges = (data.draw(st.integers(least, least + 12)) for _ in range(2))
    groups = divided(step, most, ranges=ranges)
    assert [index for group in groups for index in group] == list(range(count))
    for group in groups:
        assert planned(step, group) <= most
        assert ranges_of(step, group) <= ranges
    for group, following in pairwise(groups):
        more = [*group, following[0]]
        assert planned(step, more) > most or ranges_of(step, more) > ranges
