"""A step with several KV-cache groups: each has the plan that its own block table and window give."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.batch.batches import POISON_BLOCK, Step, steps
from tests.batch.scheduling import Known, new_request, step_output
from tests.batch.steady_plan import assert_same
from tests.batch.traffic import Traffic
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, SteadyPlanner, plan_batch
from vllm_gaudi_ucm.batch.group_planner import make_planner
from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.batch.request_table import RequestTable
from vllm_gaudi_ucm.batch.window import Window


def freed(batch: BatchInput, group: KvGroup, first_id: int) -> np.ndarray:
    """Other ids for the same blocks, and POISON_BLOCK where no row of the request sees a token of the block."""
    assert group.window is not None
    tables = np.where(batch.block_tables == POISON_BLOCK, POISON_BLOCK, batch.block_tables + first_id)
    first = group.window.first_seen(batch.num_computed.astype(np.int64)) // group.block_size
    tables[np.arange(tables.shape[1]) < first[:, None]] = POISON_BLOCK
    return tables.astype(np.int32)


@given(steps(), st.integers(1, 40), st.booleans())
def test_groups_are_planned_by_their_own_tables(step: Step, tokens: int, chunked: bool) -> None:
    """The window's tables have nothing usable before it, as after vLLM has freed those blocks."""
    groups = [
        KvGroup(0, step.block_size),
        KvGroup(1, step.block_size, Window(tokens, chunked)),
        KvGroup(2, step.block_size, Window(tokens, chunked)),
    ]
    first = step.batch_input()
    batch = first._replace(
        tables=(first.block_tables, *(freed(first, group, 1000 * group.number) for group in groups[1:]))
    )
    plan = make_planner(groups, 3).plan(batch)
    assert_same(plan._replace(groups=plan.groups[:1]), plan_batch(first, step.block_size, 3))
    for group, tables, found in zip(groups[1:], batch.tables[1:], plan.groups[1:], strict=True):
        alone = plan_batch(first._replace(tables=(tables,)), group.block_size, 3, window=group.window)
        assert_same(plan._replace(groups=(found,)), alone)
        most = group.most_blocks
        assert most is not None
        if found.unique is not None:
            assert found.unique.blocks.max() < POISON_BLOCK
            assert np.bincount(found.unique.rows).max() <= most
        if found.shared is not None:
            assert found.shared.blocks.max() < POISON_BLOCK
            assert ((found.shared.hi > 0).sum(1) <= most).all()


def test_one_group_is_planned_as_before() -> None:
    assert type(make_planner([KvGroup(0, 16)], 512)) is SteadyPlanner


def test_a_table_for_each_group() -> None:
    """Block ids come by vLLM's number of a group; two groups may read one list."""
    groups = (KvGroup(1, 4), KvGroup(0, 2, Window(3)), KvGroup(1, 4, Window(8)))
    table = RequestTable(1, 16, 4, groups=groups)
    request = Known("a", list(range(1, 8)), computed=4)
    new = new_request(request)
    new.block_ids = ([0, 7, 8, 9], [5, 6])
    other = new_request(Known("b", [1, 2]))
    other.block_ids = ([3], [4])
    table.update(step_output({"a": 3, "b": 2}, [new, other]))
    _, batch = table.scheduled({"a": 3, "b": 2})
    assert [one.tolist() for one in batch.tables] == [[[5, 6], [4, 0]], [[0, 7, 8, 9], [3, 0, 0, 0]], [[5, 6], [4, 0]]]
    assert batch.take(np.array([1])).tables[1].tolist() == [[3, 0, 0, 0]]
    table.update(step_output({}, finished=["a", "b"]))
    assert not table.block_tables.any()
    table.check_integrity()


@given(st.randoms(use_true_random=False), st.sampled_from([None, Window(9), Window(7, True)]), st.integers(1, 4))
def test_groups_that_see_as_far_have_equal_plans_but_for_blocks(
    rng: random.Random, window: Window | None, block_size: int
) -> None:
    """Steps of decodes, and others; one group shares a block that the others do not."""
    traffic = Traffic(rng, block_size, 0.1)
    groups = [KvGroup(0, block_size), *(KvGroup(k, block_size, window) for k in (1, 2, 3))]
    planner = make_planner(groups, 3)
    for _ in range(12):
        batch = traffic.step()
        tables = [batch.block_tables.copy() + 500 * k for k in (1, 2, 3)]
        if len(batch.num_computed) > 1 and rng.random() < 0.3:
            tables[2][1, :1] = tables[2][0, :1]
        plan = planner.plan(batch._replace(tables=(batch.block_tables, *tables)))
        for own, found in zip(tables, plan.groups[1:], strict=True):
            alone = plan_batch(batch._replace(tables=(own,)), block_size, 3, window=window)
            assert_same(plan._replace(groups=(found,)), alone)
