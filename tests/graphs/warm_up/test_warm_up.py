"""The driver: what it runs and in which order, what it measures, and what an error or a lack of memory costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs.shapes import COST, LIMITS, ODD_LIMITS
from tests.graphs.warm_up.look_up import look_up
from tests.graphs.warm_up.sets import bucket_sets, keys_of, server_buckets, usages
from tests.graphs.warm_up.warm_up import GIB, Machine
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShape
from vllm_gaudi_ucm.graphs.shapes.size_levels import reaching_step
from vllm_gaudi_ucm.graphs.strategies import blind_strategies
from vllm_gaudi_ucm.graphs.warm_up.extremes import extremes
from vllm_gaudi_ucm.graphs.warm_up.graph_memory import MemoryBudgetError
from vllm_gaudi_ucm.graphs.warm_up.order import choose_skeleton
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets
from vllm_gaudi_ucm.graphs.warm_up.records import GraphKey, GraphState, WarmUpProgress
from vllm_gaudi_ucm.graphs.warm_up.warm_up import GraphRuns, WarmUp

DECODE = ForwardShape("--u", 16, 0, 100)
PROMPT = ForwardShape("c--", 200, 0, 0)
TAILS = [RemainderShape(ForwardShape("cs-", 16, 4, 0, selected)) for selected in (5, 20)]


def warm_up_on(
    machine: Machine,
    ready: ReadyBuckets,
    report: Callable[[WarmUpProgress], None] = lambda progress: None,
    memory_budget: int | None = None,
    remainders: Sequence[RemainderShape] = (),
) -> WarmUp:
    run, clock = machine.run, lambda: machine.now
    return WarmUp(ready, GraphRuns(run, run, remainders, run), lambda: machine.free, report, memory_budget, clock)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_everything_runs_once_and_becomes_warm(data: st.DataObject) -> None:
    """covers: B4, B6."""
    buckets = data.draw(bucket_sets())
    usage = data.draw(usages(buckets.limits))
    ready, machine = ReadyBuckets(buckets, usage), Machine()
    warm_up = warm_up_on(machine, ready)
    skeleton = choose_skeleton(buckets, usage, 3)
    warm_up.run_skeleton(skeleton)
    assert machine.ran == skeleton.keys
    assert look_up(ready, buckets.limits.maximum) == buckets.limits.maximum
    warm_up.run_all()
    assert sorted(machine.ran, key=str) == sorted(keys_of(buckets), key=str)
    assert all(map(ready.is_warm, keys_of(buckets)))
    summary = warm_up.summary()
    assert [record.key for record in summary.records] == keys_of(buckets)
    assert summary.count(GraphState.WARM) == len(keys_of(buckets))
    assert summary.skeleton_graphs == len(skeleton.keys)
    assert summary.skeleton_seconds == 2.0 * len(skeleton.keys)
    assert summary.seconds == 2.0 * len(keys_of(buckets))
    assert summary.size == GIB * len(keys_of(buckets))


@pytest.mark.parametrize("name", ODD_LIMITS)
@pytest.mark.parametrize("strategy", blind_strategies())
def test_every_kept_bucket_is_reachable_and_warm(strategy: str, name: str) -> None:
    """Also when a budget drops half of them; covers: A17, B4, B7."""
    buckets = server_buckets(ODD_LIMITS[name], 24, strategy)
    ready, machine = ReadyBuckets(buckets), Machine()
    skeleton = choose_skeleton(buckets, None, 2)
    room = max(len(skeleton.keys), buckets.num_graphs // 2)
    warm_up = warm_up_on(machine, ready, memory_budget=room * GIB)
    warm_up.run_skeleton(skeleton)
    warm_up.run_all()
    warm = [key for key in keys_of(buckets) if ready.is_warm(key)]
    assert machine.ran == list(dict.fromkeys(machine.ran))
    assert len(warm) == len(machine.ran) <= room
    kept = BucketSet(
        [k for k in warm if not isinstance(k, int)], [k for k in warm if isinstance(k, int)], *_of(buckets)
    )
    for shape in kept.forward:
        step = reaching_step(kept, shape)
        if step is not None:
            assert look_up(ready, step).forward == shape
        else:
            assert shape == buckets.limits.maximum.forward


class CompilingMachine(Machine):
    """One that takes memory when a graph first really runs, and none where it is only compiled."""

    executes = False

    def run(self, key: GraphKey) -> None:
        free = self.free
        super().run(key)
        if not self.executes or self.ran.count(key) > 2:
            self.free = free


def test_graphs_that_were_only_compiled_are_predicted_from_those_that_ran() -> None:
    """A budget holds them as if all had run: nothing is free of cost because it was not executed. covers: B7."""
    buckets = server_buckets(ODD_LIMITS["one request"], 24, "exponential")
    ready, machine, keys = ReadyBuckets(buckets), CompilingMachine(), keys_of(buckets)
    skeleton = choose_skeleton(buckets, None, 2)
    room = len(skeleton.keys) + 3
    assert room < len(keys)
    warm_up = warm_up_on(machine, ready, memory_budget=room * GIB)
    warm_up.run_skeleton(skeleton, compile_only=True)
    assert warm_up.summary().size == 0
    assert not ready.dropped
    machine.executes = True
    ends = extremes(skeleton.keys)
    warm_up.execute(ends)
    assert machine.free == (100 - len(ends)) * GIB
    assert warm_up.summary().size == len(skeleton.keys) * GIB
    assert len(ready.dropped) == len(keys) - room
    machine.executes = False
    warm_up.run_all(compile_only=True)
    assert warm_up.summary().count(GraphState.WARM) == room
    assert 0.9 * room * GIB < warm_up.summary().size <= room * GIB
    machine.executes = True
    ran = len(machine.ran)
    warm_up.execute([*ends, *(key for key in keys if ready.is_warm(key) and key not in ends)])
    assert len(machine.ran) == ran + room - len(ends), "what has run is not measured again"
    assert machine.free == (100 - room) * GIB


def _of(buckets: BucketSet) -> tuple:
    return buckets.limits, buckets.cost


def test_an_error_costs_its_bucket_and_nothing_else() -> None:
    """The graph is tried once, its steps keep their larger bucket, the others become warm."""
    machine, reports = Machine(), []
    machine.broken[DECODE] = RuntimeError("phase --- ran instead of --u")
    buckets = BucketSet([DECODE, PROMPT], [4], LIMITS, COST)
    ready = ReadyBuckets(buckets)
    warm_up = warm_up_on(machine, ready, reports.append)
    warm_up.run_skeleton(choose_skeleton(buckets, None, 1))
    warm_up.run_all()
    assert machine.ran == [LIMITS.maximum.forward, 16, PROMPT, 4]
    assert look_up(ready, Bucket("--u", 4, 0, 30, 4)) == LIMITS.maximum.forward.step(4)
    (failed,) = [report.ended for report in reports if report.ended and report.ended.state is GraphState.FAILED]
    assert (failed.key, failed.seconds, failed.size) == (DECODE, 2.0, 0)
    assert failed.reason == "RuntimeError: phase --- ran instead of --u"
    assert failed in warm_up.summary().records


def test_an_error_in_the_skeleton_is_the_callers() -> None:
    machine = Machine()
    machine.broken[LIMITS.maximum.forward] = RuntimeError("out of memory")
    buckets = BucketSet((), (), LIMITS, COST)
    warm_up = warm_up_on(machine, ReadyBuckets(buckets))
    with pytest.raises(RuntimeError, match="out of memory"):
        warm_up.run_skeleton(choose_skeleton(buckets, None, 4))


def test_reports_count_seconds_and_what_is_left() -> None:
    reports: list[WarmUpProgress] = []
    buckets = BucketSet([DECODE, PROMPT], [4], LIMITS, COST)
    warm_up = warm_up_on(Machine(), ReadyBuckets(buckets), reports.append)
    warm_up.run_skeleton(choose_skeleton(buckets, None, 1))
    assert [(r.stage, r.done, r.total, r.seconds, r.seconds_left) for r in reports] == [
        ("skeleton", 0, 2, 0.0, None),
        ("skeleton", 1, 2, 2.0, 2.0),
        ("skeleton", 1, 2, 2.0, 2.0),
        ("skeleton", 2, 2, 4.0, 0.0),
    ]
    assert [r.current for r in reports] == [LIMITS.maximum.forward, None, 16, None]
    assert reports[-1].free_memory == 98 * GIB
    reports.clear()
    warm_up.run_all()
    assert [(r.stage, r.done, r.total) for r in reports[::2]] == [("rest", 0, 3), ("rest", 1, 3), ("rest", 2, 3)]
    assert (reports[-1].done, reports[-1].seconds, reports[-1].seconds_left) == (3, 10.0, 0.0)


def test_the_budget_is_looked_at_before_each_graph() -> None:
    """The skeleton said 1 GiB each; then every graph takes 4. covers: B7."""
    buckets = BucketSet([ForwardShape("--u", rows, 0, 100) for rows in (2, 4, 8, 16)], (), LIMITS, COST)
    ready, machine = ReadyBuckets(buckets), Machine()
    warm_up = warm_up_on(machine, ready, memory_budget=8 * GIB)
    warm_up.run_skeleton(choose_skeleton(buckets, None, 1))
    assert not ready.dropped
    machine.size = 4 * GIB
    warm_up.run_all()
    assert len(machine.ran) == 3
    assert len(ready.dropped) == 3
    assert all("ucm.graphs.memory_budget is 8.00 GiB, of which 6.00 GiB" in why for why in ready.dropped.values())
    assert warm_up.summary().count(GraphState.DROPPED) == 3


def test_graphs_for_remainders_are_warm_before_serving_and_never_dropped() -> None:
    """Seen as all others are, and no bucket that a lookup could find. covers: B1, B6, B7."""
    buckets = BucketSet([DECODE, PROMPT], (), LIMITS, COST)
    ready, machine, reports = ReadyBuckets(buckets), Machine(), list[WarmUpProgress]()
    warm_up = warm_up_on(machine, ready, reports.append, memory_budget=4 * GIB, remainders=TAILS)
    warm_up.run_skeleton(choose_skeleton(buckets, None, 1))
    assert machine.ran == [LIMITS.maximum.forward, 16, *(tail.forward for tail in TAILS)]
    assert [(report.done, report.total) for report in reports if report.stage == "skeleton"][-1] == (4, 4)
    assert [report.current for report in reports[4:8:2]] == TAILS
    warm_up.run_all()
    assert set(ready.dropped) == {DECODE, PROMPT}
    summary = warm_up.summary()
    assert [record.key for record in summary.records] == [*buckets.forward, *TAILS, *buckets.logits]
    assert (summary.skeleton_graphs, summary.skeleton_seconds, summary.size) == (4, 8.0, 4 * GIB)
    assert summary.count(GraphState.WARM) == 4
    assert warm_up.last_seconds(TAILS[0]) == 2.0
    assert look_up(ready, Bucket("cs-", 16, 4, 0, 1)) == LIMITS.maximum


def test_graphs_for_remainders_take_their_part_of_the_budget() -> None:
    """covers: B7."""
    buckets = BucketSet([ForwardShape("--u", rows, 0, 100) for rows in (2, 4, 8, 16)], (), LIMITS, COST)
    for budget, dropped in ((8 * GIB, 0), (7 * GIB, 1), (4 * GIB, 4)):
        ready = ReadyBuckets(buckets)
        warm_up = warm_up_on(Machine(), ready, memory_budget=budget, remainders=TAILS)
        warm_up.run_skeleton(choose_skeleton(buckets, None, 1))
        warm_up.run_all()
        assert len(ready.dropped) == dropped
    warm_up = warm_up_on(Machine(), ReadyBuckets(buckets), memory_budget=3 * GIB, remainders=TAILS)
    with pytest.raises(MemoryBudgetError, match=r"the 4 graphs with which serving starts take 4.000 GiB"):
        warm_up.run_skeleton(choose_skeleton(buckets, None, 1))


def test_a_full_device_stops_warm_up_before_it_runs_out() -> None:
    """covers: B7."""
    buckets = BucketSet([DECODE, PROMPT], (), LIMITS, COST)
    ready, machine = ReadyBuckets(buckets), Machine(free=2 * GIB + 5)
    warm_up = warm_up_on(machine, ready)
    warm_up.run_skeleton(choose_skeleton(buckets, None, 1))
    warm_up.run_all()
    assert set(ready.dropped) == {DECODE, PROMPT}
    assert "0.00 GiB are free on the device" in ready.dropped[DECODE]


def test_a_budget_below_the_skeleton_is_an_error() -> None:
    buckets = BucketSet([DECODE, PROMPT], (), LIMITS, COST)
    warm_up = warm_up_on(Machine(), ReadyBuckets(buckets), memory_budget=GIB)
    with pytest.raises(MemoryBudgetError, match=r"ucm.graphs.memory_budget is 1.000 GiB.* take 2.000 GiB"):
        warm_up.run_skeleton(choose_skeleton(buckets, None, 1))
