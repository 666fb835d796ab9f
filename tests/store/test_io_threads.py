"""Calls with a deadline in a bounded number of threads."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from vllm_gaudi_ucm.store.io_threads import AbandonedError, DeadlineExceededError, IoThreads, Job


@pytest.fixture
def threads() -> Iterator[IoThreads]:
    threads = IoThreads("test-io", 2)
    yield threads
    threads.close(60)


def test_results_and_errors_come_back(threads: IoThreads) -> None:
    assert threads.call(lambda _: 7, 5) == 7
    with pytest.raises(KeyError):
        threads.call(lambda _: {}[1], 5)


def test_threads_are_started_as_needed_and_used_again(threads: IoThreads) -> None:
    before = threading.active_count()
    for _ in range(20):
        threads.call(lambda _: None, 60)
    assert threading.active_count() - before <= 2
    both = threading.Barrier(2, timeout=60)
    callers = [threading.Thread(target=threads.call, args=(lambda _: both.wait(), 60)) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not both.broken


def test_a_queued_call_that_gives_up_never_runs(threads: IoThreads) -> None:
    gate = threading.Event()
    for _ in range(2):
        threads.begin(lambda: gate.wait(60) and None)
    ran = []
    with pytest.raises(DeadlineExceededError, match=r"no answer within 0\.05 s"):
        threads.call(lambda _: ran.append(1), 0.05)
    gate.set()
    threads.call(lambda _: None, 60)
    assert ran == []


def test_handover_after_the_caller_has_gone(threads: IoThreads) -> None:
    outcome: list[str] = []
    left = threading.Event()

    def late(job: Job[None]) -> None:
        left.wait(60)
        try:
            with job.handover():
                outcome.append("touched")
        except AbandonedError:
            outcome.append("abandoned")

    with pytest.raises(DeadlineExceededError):
        threads.call(late, 0.05)
    left.set()
    threads.close(60)
    assert outcome == ["abandoned"]


def test_a_caller_waits_for_a_handover_that_has_begun(threads: IoThreads) -> None:
    buffer: list[int] = []

    def slow_copy(job: Job[str]) -> str:
        with job.handover():
            time.sleep(0.2)
            buffer.append(1)
        return "done"

    with contextlib.suppress(DeadlineExceededError):  # or not: the call may end while its caller waits for the copy
        threads.call(slow_copy, 0.05)
    assert buffer == [1]  # nothing is written after the caller has gone on


def test_closed_threads_take_nothing() -> None:
    threads = IoThreads("test-io", 1)
    threads.call(lambda _: None, 60)
    assert threads.close(60)
    with pytest.raises(RuntimeError, match="test-io is closed"):
        threads.call(lambda _: None, 60)


def test_a_stuck_thread_does_not_keep_the_interpreter() -> None:
    """covers: C2"""
    program = (
        "import time\nfrom vllm_gaudi_ucm.store.io_threads import IoThreads\n"
        "threads = IoThreads('x', 1)\nthreads.begin(lambda: time.sleep(600))\n"
        "time.sleep(0.2)\nassert not threads.close(0.1)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
