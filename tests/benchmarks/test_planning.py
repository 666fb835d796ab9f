"""The planning benchmark: the peer decides what the planner decides, and the comparison sees every difference."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import planning
from benchmarks.planning import PlansDiffer, Workload, difference, main, measure
from benchmarks.planning_peer import plan_plainly
from tests.batch.batches import Request, Step, lay_out, steps
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, GroupPlan, UnifiedPlan, plan_batch

SMALL = Workload("small", requests=5, context=600, prefix=256, prefixes=2, steady=True, goal_ms=1.0)


@given(steps(), st.sampled_from([1, 3, 512]))
def test_the_peer_plans_the_same(step: Step, causal_slice: int) -> None:
    """A second rendering of the rule, compared field by field. covers: A1 A3 A5 A13 A15"""
    batch = step.batch_input()
    batch.block_tables[batch.block_tables == np.iinfo(np.int32).max] = 0  # the peer reads what it then drops
    ours, theirs = (plan(batch, step.block_size, causal_slice) for plan in (plan_batch, plan_plainly))
    assert difference(ours, theirs) is None


def a_plan() -> UnifiedPlan:
    """With every part, two groups, and a partial chunk."""
    requests = [Request(40, 1, prefix=2), Request(40, 1, prefix=1), Request(32, 5, behind=3, prefix=2), Request(0, 4)]
    return plan_batch(lay_out(requests, 16, 0).batch_input(), 16)


def changed(value: Any) -> Any:
    """The value with its last number one larger, or one entry less where a list ends with it."""
    if isinstance(value, np.ndarray):
        copy = value.copy()
        copy.flat[-1] += 1
        return copy
    return value + 1 if isinstance(value, int) else value[:-1]


def replaced(plan: UnifiedPlan, **changes: Any) -> UnifiedPlan:
    """The plan with other fields, of its own or of its only group."""
    of_group = {name: changes.pop(name) for name in GroupPlan._fields if name in changes}
    (group,) = plan.groups
    return plan._replace(groups=(group._replace(**of_group),), **changes)


@pytest.mark.parametrize("name", ["requests", "query_start", "row_requests", "positions", "slots", "num_single"])
def test_a_difference_in_rows_is_seen(name: str) -> None:
    plan = a_plan()
    assert difference(plan, plan) is None
    assert difference(plan, replaced(plan, **{name: changed(getattr(plan, name))})) == name


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ("causal", "groups"),
        ("causal", "slices"),
        ("shared", "blocks"),
        ("shared", "lo"),
        ("shared", "hi"),
        ("shared", "groups"),
        ("unique", "blocks"),
        ("unique", "rows"),
        ("unique", "lo"),
        ("unique", "hi"),
    ],
)
def test_a_difference_in_a_part_is_seen(part: str, field: str) -> None:
    plan = a_plan()
    value = getattr(plan, part)
    other = value._replace(**{field: changed(getattr(value, field))})
    for wrong in (other, None):
        assert difference(plan, replaced(plan, **{part: wrong})) == part


def test_the_order_of_shared_blocks_is_no_difference() -> None:
    plan = a_plan()
    assert plan.shared is not None
    blocks, lo, hi, groups, _ = plan.shared
    count = len(blocks)
    turned = [(rows, count - end, count - begin) for rows, begin, end in groups[::-1]]
    shared = plan.shared._replace(blocks=blocks[::-1], lo=lo[:, ::-1], hi=hi[:, ::-1], groups=turned)
    assert difference(plan, replaced(plan, shared=shared)) is None


def test_every_step_of_both_sides_is_timed() -> None:
    result = measure(SMALL, 45)
    assert len(result.ours) == len(result.peer) == 45
    assert min(result.ours + result.peer) > 0
    assert result.ratio == pytest.approx(np.median(result.peer) / np.median(result.ours))


def test_steps_are_successive_decodes_with_appended_blocks() -> None:
    batches = list(SMALL.steps(200))
    for before, after in pairwise(batches):
        assert (after.num_computed == before.num_computed + 1).all()
        width = before.block_tables.shape[1]
        assert (after.block_tables[:, :width] == before.block_tables).all()
    assert batches[-1].block_tables.shape[1] > batches[0].block_tables.shape[1]
    first = batches[0].block_tables[:, :2]
    assert (first[0] == first[2]).all()
    assert not (first[0] == first[1]).any()


def test_a_chunk_stays_the_same_and_is_a_prompt() -> None:
    batches = list(Workload("chunk", requests=3, context=600, chunk=70).steps(3))
    assert [batch.num_scheduled.tolist() for batch in batches] == [[1, 1, 70]] * 3
    assert batches[0].num_computed[2] == batches[2].num_computed[2]
    plan = plan_batch(batches[0], planning.BLOCK_SIZE)
    assert plan.causal is not None
    assert len(plan.logits_rows) == 3


def test_a_peer_that_plans_otherwise_ends_the_measurement() -> None:
    def wrong(batch: BatchInput, block_size: int) -> UnifiedPlan:
        plan = plan_plainly(batch, block_size)
        return replaced(plan, slots=plan.slots + 1)

    with pytest.raises(PlansDiffer, match=r"small, step 19: the plans differ in slots"):
        measure(SMALL, 30, wrong)


def test_table_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(planning, "WORKLOADS", (SMALL, Workload("free", 2, 300)))
    assert main(["--steps", "5"]) == 0
    out = capsys.readouterr().out
    assert "small" in out
    assert "1.000" in out
    assert main(["--steps", "5", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["workload"] for row in rows] == ["small", "free"]
    assert [row["goal_ms"] for row in rows] == [1.0, None]
    assert all(row["ratio"] == pytest.approx(row["peer_ms"] / row["ours_ms"]) for row in rows)


def test_different_plans_are_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def differ(*_: object) -> None:
        raise PlansDiffer("small, step 0: the plans differ in slots")

    monkeypatch.setattr(planning, "measure", differ)
    assert main([]) == 1
    assert "the plans differ in slots" in capsys.readouterr().err


def test_a_bad_number_of_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "0"])
    assert "found 0, expected a number >= 1" in capsys.readouterr().err


def test_the_goals_are_those_that_were_set() -> None:
    goals = {w.name: (w.requests, w.context, w.prefix, w.steady, w.goal_ms) for w in planning.WORKLOADS if w.goal_ms}
    assert list(goals.values()) == [
        (64, 4096, 0, False, 0.06),
        (256, 4096, 2048, False, 0.2),
        (64, 4096, 0, True, 0.015),
    ]
