"""From places in the queue to prefetches, and what happens as the queue moves."""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.prefetch.stores import keys
from vllm_gaudi_ucm.prefetch.plan import AccessHistory, PrefetchPlan, PrefetchPlanner, QueuedRequest, plan_prefetch
from vllm_gaudi_ucm.prefetch.tasks import PrefetchPriority

URGENT, HIGH, NORMAL, LOW = PrefetchPriority


def request(number: int, blocks: int = 2) -> QueuedRequest:
    return QueuedRequest(f"r{number}", tuple(keys(*range(100 * number, 100 * number + blocks))))


def by_history(request: QueuedRequest) -> list[bytes]:
    return [request.keys[at] for at in AccessHistory(10).order(request.keys)]


def planner(batch_size: int = 4, batches_ahead: int = 2, max_blocks: int = 1000) -> PrefetchPlanner:
    return PrefetchPlanner(batch_size, batches_ahead, max_blocks, AccessHistory(1000))


def test_priorities_follow_the_queue() -> None:
    plan = plan_prefetch([request(0)], [request(number) for number in range(1, 30)], 20, 2, 1000, by_history)
    assert [prefetch.request_id for prefetch in plan] == [f"r{number}" for number in range(30)]
    assert [prefetch.priority for prefetch in plan] == [URGENT] + [HIGH] * 4 + [NORMAL] * 12 + [LOW] * 13


@pytest.mark.parametrize("batches_ahead", [0, 1, 3])
def test_prefetch_ahead_is_how_far_it_looks(batches_ahead: int) -> None:
    """covers: C4"""
    waiting = [request(number) for number in range(1, 30)]
    plan = plan_prefetch([request(0)], waiting, 4, batches_ahead, 1000, by_history)
    assert len(plan) == (1 + 4 * batches_ahead if batches_ahead else 0)


def test_a_plan_is_not_larger_than_the_cache() -> None:
    """The request that fills it is cut by history and position; blocks that are planned already cost nothing."""
    same = QueuedRequest("same", request(1, 4).keys)
    plan = plan_prefetch([], [request(1, 4), same, request(2, 4), request(3)], 4, 2, 6, by_history)
    assert [(prefetch.request_id, len(prefetch.keys)) for prefetch in plan] == [("r1", 4), ("same", 4), ("r2", 2)]
    assert plan[2].keys == tuple(keys(200, 203)), "the sink, and the newest"
    assert len({key for prefetch in plan for key in prefetch.keys}) == 6


def test_the_plan_moves_with_the_queue() -> None:
    made = planner()
    waiting = [request(number) for number in range(12)]
    first = made.update([], waiting)
    assert [prefetch.request_id for prefetch in first.submit] == [f"r{number}" for number in range(8)]
    assert not made.update([], waiting)
    moved = made.update([], waiting[2:])
    assert moved.cancel == ("r0", "r1")
    assert [prefetch.request_id for prefetch in moved.submit] == ["r8", "r9"]
    assert moved.move == (("r4", HIGH), ("r5", HIGH))
    back = made.update([], [waiting[11], *waiting[2:9]])
    assert [prefetch.request_id for prefetch in back.submit] == ["r11"]
    assert back.cancel == ("r9",)
    assert back.move == (("r5", NORMAL),)
    assert made.update([], []).cancel == ("r11", "r2", "r3", "r4", "r5", "r6", "r7", "r8")


def test_a_request_with_other_keys_is_planned_anew() -> None:
    made = planner()
    made.update([], [request(1, 2)])
    assert not made.update([], [request(1, 2)])
    assert made.update([], [request(1, 5)]).submit[0].keys == tuple(keys(100, 104, 103, 102, 101))


def test_a_request_that_was_cut_gets_the_rest_when_there_is_room() -> None:
    made = planner(max_blocks=6)
    first = made.update([], [request(1, 4), request(2, 4)])
    assert [len(prefetch.keys) for prefetch in first.submit] == [4, 2]
    second = made.update([], [request(2, 4)])
    assert second.cancel == ("r1",)
    assert [(prefetch.request_id, len(prefetch.keys), prefetch.priority) for prefetch in second.submit] == [
        ("r2", 4, HIGH)
    ]


def test_history_is_asked_when_a_request_comes_into_reach() -> None:
    """covers: C14. Later accesses change nothing of a plan that is under way."""
    made = planner()
    made.history.record(keys(101, 101))
    assert made.update([], [request(1, 4)]).submit[0].keys == tuple(keys(100, 101, 103, 102))
    made.history.record(keys(102, 102, 102))
    assert not made.update([], [request(1, 4)])
    assert made.update([], [request(2), request(1, 4)]).submit[0].request_id == "r2"


def test_random_queues_agree_with_the_plan_from_scratch() -> None:
    """What was submitted and not cancelled is what a new plan would hold."""
    chance, made, live = random.Random(3), planner(3, 2, 40), {}
    pool = [request(number, 1 + number % 5) for number in range(20)]
    for _ in range(300):
        queue = chance.sample(pool, chance.randrange(12))
        plan = made.update([], queue)
        for name in plan.cancel:
            del live[name]
        live |= {prefetch.request_id: prefetch.priority for prefetch in plan.submit}
        for name, priority in plan.move:
            assert live[name] is not priority
            live[name] = priority
        target = plan_prefetch([], queue, 3, 2, 40, by_history)
        assert live == {prefetch.request_id: prefetch.priority for prefetch in target}


def test_a_plan_is_plain_data() -> None:
    plan = planner().update([request(0)], [request(1)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=PrefetchPlan) == plan
    assert not PrefetchPlan()
