"""When what waits to be stored is stored: at once by an idle engine, late but surely by one that never rests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from vllm_gaudi_ucm.connector.block_saver import POLL_SECONDS, SaveQueue
from vllm_gaudi_ucm.device.step_activity import IDLE_SECONDS, StepActivity


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Storing:
    """A thread that takes what is to be stored, and notes it."""

    def __init__(self, queue: SaveQueue, threads: int = 1) -> None:
        self.keys: list[bytes] = []
        self._queue = queue
        self.threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def _run(self) -> None:
        while (save := self._queue.take_save()) is not None:
            self.keys.append(save.key)
            self._queue.release()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def activity(clock: Clock) -> StepActivity:
    """Of an engine in the middle of a step."""
    activity = StepActivity(clock)
    activity.begin()
    return activity


def put(queue: SaveQueue, *numbers: int) -> None:
    assert queue.reserve(len(numbers)) == len(numbers)
    queue.put([(bytes([number]), memoryview(b""), True) for number in numbers])


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def has_rested(storing: Storing) -> bool:
    """Nothing is stored while a thread looks several times."""
    before = len(storing.keys)
    time.sleep(5 * POLL_SECONDS)
    return len(storing.keys) == before


def test_a_request_that_waits_for_blocks_hurries_them(clock: Clock, activity: StepActivity) -> None:
    queue = SaveQueue(16, 60.0, activity, clock)
    storing = Storing(queue)
    put(queue, 1, 2, 3)
    assert has_rested(storing)
    queue.hurry()
    wait_until(lambda: len(storing.keys) == 3)
    clock.now += 1.0
    put(queue, 4)
    assert has_rested(storing), "it came later"
    queue.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_wait_for_the_end_of_steps(clock: Clock, activity: StepActivity, threads: int) -> None:
    queue = SaveQueue(16, 60.0, activity, clock)
    storing = Storing(queue, threads)
    put(queue, 1, 2, 3)
    assert has_rested(storing)
    activity.end()
    assert has_rested(storing), "the next step of the request may be about to begin"
    activity.begin()
    clock.now += 10 * IDLE_SECONDS
    assert has_rested(storing)
    activity.end()
    clock.now += IDLE_SECONDS
    wait_until(lambda: sorted(storing.keys) == [b"\1", b"\2", b"\3"])
    queue.close()
    queue.check_integrity()


def test_an_engine_that_is_idle_stores_at_once(clock: Clock) -> None:
    queue = SaveQueue(16, 60.0, StepActivity(clock), clock)
    storing = Storing(queue)
    put(queue, 1, 2)
    wait_until(lambda: storing.keys == [b"\1", b"\2"])


def test_an_engine_that_never_rests_stores_after_the_patience(clock: Clock, activity: StepActivity) -> None:
    """covers: C4"""
    queue = SaveQueue(16, 3.0, activity, clock)
    storing = Storing(queue)
    put(queue, 1)
    clock.now += 2
    put(queue, 2)
    assert has_rested(storing)
    clock.now += 1
    wait_until(lambda: storing.keys == [b"\1"])
    assert has_rested(storing), "the second one has waited for a second only"
    clock.now += 2
    wait_until(lambda: storing.keys == [b"\1", b"\2"])


def test_without_patience_nothing_waits(clock: Clock, activity: StepActivity) -> None:
    """covers: C4"""
    queue = SaveQueue(16, 0.0, activity, clock)
    storing = Storing(queue)
    put(queue, 1, 2)
    wait_until(lambda: storing.keys == [b"\1", b"\2"])


def test_no_more_than_half_of_the_places_wait(clock: Clock, activity: StepActivity) -> None:
    queue = SaveQueue(8, 60.0, activity, clock)
    storing = Storing(queue)
    put(queue, *range(4))
    assert has_rested(storing)
    put(queue, 4, 5)
    wait_until(lambda: len(storing.keys) == 2)
    assert has_rested(storing)
    assert storing.keys == [b"\0", b"\1"]
    assert queue.taken == 4


def test_a_step_that_needs_more_room_gets_it(clock: Clock, activity: StepActivity) -> None:
    queue = SaveQueue(8, 60.0, activity, clock)
    storing = Storing(queue)
    put(queue, *range(4))
    assert has_rested(storing)
    queue.expect(6)
    wait_until(lambda: len(storing.keys) == 2)
    assert has_rested(storing), "there is room for six now"
    put(queue, *range(4, 10))
    wait_until(lambda: len(storing.keys) == 6)
    assert queue.taken == 4


def test_a_full_queue_gives_what_it_has_room_for(activity: StepActivity) -> None:
    queue = SaveQueue(3, 60.0, activity)
    assert (queue.reserve(2), queue.reserve(2), queue.reserve(2)) == (2, 1, 0)


@pytest.mark.parametrize("threads", [1, 3])
def test_flushing_waits_for_no_step(clock: Clock, activity: StepActivity, threads: int) -> None:
    queue = SaveQueue(16, 60.0, activity, clock)
    storing = Storing(queue, threads)
    put(queue, *range(6))
    assert queue.flush(60.0)
    assert len(storing.keys) == 6
    put(queue, 6)
    assert has_rested(storing), "it waits again"
    queue.close()
    for thread in storing.threads:
        thread.join(60)
    assert len(storing.keys) == 7, "a closed queue waits for nothing"


def test_flushing_ends_in_time(activity: StepActivity) -> None:
    queue = SaveQueue(2, 60.0, activity)
    put(queue, 1)
    assert not queue.flush(0.01)


def test_a_thread_that_hangs_leaves_the_others_their_work(clock: Clock, activity: StepActivity) -> None:
    queue = SaveQueue(16, 60.0, activity, clock)
    put(queue, 1, 2, 3)
    clock.now += 60
    assert queue.take_save() is not None
    storing = Storing(queue, 2)
    wait_until(lambda: sorted(storing.keys) == [b"\2", b"\3"])
    assert queue.taken == 1
    queue.check_integrity()
