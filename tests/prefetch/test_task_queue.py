"""The queue's order, against a model that sorts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.prefetch.stores import keys
from vllm_gaudi_ucm.prefetch.tasks import PrefetchPriority, PrefetchTask, TaskQueue

PRIORITIES = st.sampled_from(PrefetchPriority)


def task(sequence: int, priority: PrefetchPriority, submitted: float = 0.0) -> PrefetchTask:
    return PrefetchTask(f"r{sequence}", keys(1, 2), priority, None, submitted, 10.0, sequence)


@given(st.lists(st.tuples(PRIORITIES, st.sampled_from([0.0, 0.5, 3.0]), PRIORITIES | st.none(), st.booleans())))
def test_order_moves_and_removals(steps: list[tuple[PrefetchPriority, float, PrefetchPriority | None, bool]]) -> None:
    """covers: C1. Equal ranks come in the order of submission; tasks themselves are never compared."""
    queue = TaskQueue(ageing=1.0)
    left = []
    for sequence, (priority, submitted, moved_to, removed) in enumerate(steps):
        new = task(sequence, priority, submitted)
        queue.put(new)
        if moved_to is not None:
            new.priority = moved_to
            queue.put(new)
        if removed:
            queue.remove(new)
        else:
            left.append(new)
        assert (new in queue) is not removed
    assert queue.depths().total() == 2 * len(left)
    left.sort(key=lambda t: (t.submitted + t.priority, t.sequence))
    for expected in left:
        assert queue.first() is expected
        queue.remove(expected)
    assert queue.first() is None
    assert len(queue) == 0


def test_moves_do_not_make_it_grow() -> None:
    queue = TaskQueue(ageing=1.0)
    tasks = [task(number, PrefetchPriority.LOW) for number in range(10)]
    for turn in range(1000):
        moved = tasks[turn % 10]
        moved.priority = PrefetchPriority(turn % 4)
        queue.put(moved)
    assert len(queue) == 10
    assert len(queue._heap) <= 2 * 10 + 64
