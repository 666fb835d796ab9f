"""The idle thread: nothing during a step, pause, resume, stop, errors; and the rule that says when a gap is a gap."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.graphs.shapes import COST, LIMITS
from tests.graphs.warm_up.sets import keys_of
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.warm_up.idle_rule import IdleRule
from vllm_gaudi_ucm.graphs.warm_up.idle_warm_up import IdleWarmUp
from vllm_gaudi_ucm.graphs.warm_up.order import choose_skeleton
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets
from vllm_gaudi_ucm.graphs.warm_up.records import GraphKey, GraphState
from vllm_gaudi_ucm.graphs.warm_up.warm_up import GraphRuns, WarmUp

TIMEOUT = 120
AT_ONCE = IdleRule(least=0.0, most=0.0)
BUCKETS = BucketSet([ForwardShape("--u", rows, 0, 100) for rows in (2, 4, 8, 16)], [4], LIMITS, COST)


class Gate:
    """Holds the warm-up thread inside a graph until it is let through."""

    def __init__(self) -> None:
        self.entered, self.passes = threading.Semaphore(0), threading.Semaphore(0)
        self.inside = False
        self.ran: list[GraphKey] = []

    def run(self, key: GraphKey) -> None:
        self.inside = True
        self.entered.release()
        assert self.passes.acquire(timeout=TIMEOUT)
        self.inside = False
        self.ran.append(key)

    def wait_until_entered(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT)


class Setting:
    """Skeleton warm, four graphs to go."""

    def __init__(self, rule: IdleRule = AT_ONCE) -> None:
        self.gate, self.finished = Gate(), threading.Event()
        self.ready = ReadyBuckets(BUCKETS)
        self.warm_up = WarmUp(self.ready, GraphRuns(self.gate.run, self.gate.run), lambda: 0, lambda progress: None)
        self.idle = IdleWarmUp(self.warm_up, rule, self.finished.set)
        skeleton = choose_skeleton(BUCKETS, None, 1)
        self.gate.passes.release(len(skeleton.keys))
        self.warm_up.run_skeleton(skeleton)
        for _ in skeleton.keys:
            self.gate.wait_until_entered()
        self.gate.ran.clear()

    def waits_in(self, call: Callable[[], None], state: str) -> threading.Thread:
        """A thread that has called what sets `state`, and now waits there for the graph."""
        thread = threading.Thread(target=call)
        thread.start()
        end = time.monotonic() + TIMEOUT
        while not getattr(self.idle, state):
            assert time.monotonic() < end
            time.sleep(0.001)
        return thread

    def open(self) -> None:
        """From now on nothing holds the thread."""
        self.gate.passes.release(100)


@pytest.fixture
def setting() -> Iterator[Setting]:
    made = Setting()
    yield made
    made.open()
    made.idle.end_step()
    made.idle.stop()
    assert not made.idle.running


def test_warms_everything_and_ends(setting: Setting) -> None:
    setting.open()
    setting.idle.start()
    assert setting.finished.wait(TIMEOUT)
    assert sorted(map(str, setting.gate.ran)) == sorted(
        str(key) for key in keys_of(BUCKETS) if key not in (LIMITS.maximum.forward, 16)
    )
    assert not setting.ready.cold
    with setting.idle.step():
        pass
    assert setting.idle.waits == 0


def test_a_step_waits_for_the_graph_and_then_no_other_starts(setting: Setting) -> None:
    setting.idle.start()
    setting.gate.wait_until_entered()
    step = setting.waits_in(setting.idle.begin_step, "_in_step")
    setting.open()
    step.join(TIMEOUT)
    assert not step.is_alive()
    assert not setting.gate.inside
    assert len(setting.gate.ran) == setting.idle.waits == 1
    # the thread has had every opportunity, and the step is still open
    assert not setting.finished.wait(0.2)
    assert len(setting.gate.ran) == 1
    setting.idle.end_step()
    assert setting.finished.wait(TIMEOUT)
    assert len(setting.gate.ran) == 5


def test_many_steps_never_meet_a_graph(setting: Setting) -> None:
    """Steps as fast as they can, until everything is warm."""
    setting.open()
    setting.idle.start()
    for _ in range(100_000):
        with setting.idle.step():
            assert not setting.gate.inside
        if setting.finished.is_set():
            break
    assert setting.finished.wait(TIMEOUT)


def test_stop_waits_for_the_graph_and_start_goes_on(setting: Setting) -> None:
    setting.idle.start()
    setting.gate.wait_until_entered()
    stop = setting.waits_in(setting.idle.stop, "_stopping")
    setting.gate.passes.release()
    stop.join(TIMEOUT)
    assert not setting.idle.running
    assert len(setting.gate.ran) == 1
    setting.idle.stop()
    with setting.idle.step():
        pass
    setting.open()
    setting.idle.start()
    assert setting.finished.wait(TIMEOUT)
    assert len(setting.gate.ran) == 5


def test_stop_ends_a_thread_that_waits(setting: Setting) -> None:
    """For a step, or for a gap."""
    setting.idle.begin_step()
    setting.idle.start()
    setting.idle.stop()
    setting.idle.end_step()
    waiting = Setting(IdleRule(least=1000.0, most=1000.0))
    waiting.idle.start()
    waiting.idle.stop()
    assert setting.gate.ran == waiting.gate.ran == []


def test_a_step_that_never_ended_is_continued(setting: Setting) -> None:
    setting.idle.begin_step()
    setting.idle.begin_step()
    setting.idle.end_step()
    setting.open()
    setting.idle.start()
    assert setting.finished.wait(TIMEOUT)


def test_an_error_in_a_graph_does_not_end_the_thread() -> None:
    finished, ready = threading.Event(), ReadyBuckets(BUCKETS)

    def run(key: GraphKey) -> None:
        if key == BUCKETS.forward[1]:
            raise MemoryError("device")

    warm_up = WarmUp(ready, GraphRuns(run, run), lambda: 0, lambda progress: None)
    warm_up.run_skeleton(choose_skeleton(BUCKETS, None, 1))
    idle = IdleWarmUp(warm_up, AT_ONCE, finished.set)
    idle.start()
    assert finished.wait(TIMEOUT)
    idle.stop()
    assert ready.dropped == {BUCKETS.forward[1]: "MemoryError: device"}
    assert warm_up.summary().count(GraphState.FAILED) == 1
    assert warm_up.summary().count(GraphState.WARM) == len(keys_of(BUCKETS)) - 1


@pytest.mark.parametrize(
    ("last", "idle", "wait"),
    [
        (0.0, 0.0, 0.05),  # nothing known, or very fast: not between two steps
        (0.3, 0.0, 0.3),
        (0.3, 0.2, 0.1),
        (0.3, 0.4, 0.0),
        (14.0, 0.5, 1.5),  # not forever
        (14.0, 2.0, 0.0),
    ],
)
def test_idle_rule(last: float, idle: float, wait: float) -> None:
    assert IdleRule().seconds_to_wait(last, idle) == pytest.approx(wait)


def test_the_gap_is_measured_from_the_end_of_the_last_step() -> None:
    """With a clock of its own: steps keep moving the start of the gap."""
    now = 0.0
    setting = Setting()
    idle = IdleWarmUp(setting.warm_up, IdleRule(0.05, 2.0), setting.finished.set, lambda: now)
    setting.open()
    now = 10.0
    idle.begin_step()
    idle.end_step()
    idle.start()
    assert not setting.finished.wait(0.2)
    assert setting.gate.ran == []
    now = 10.06
    assert setting.finished.wait(TIMEOUT)
    idle.stop()


EXIT = """
import sys, threading, time
sys.path.insert(0, {root!r})
from tests.graphs.warm_up.test_idle_warm_up import AT_ONCE, BUCKETS
from vllm_gaudi_ucm.graphs.warm_up.idle_warm_up import IdleWarmUp
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets
from vllm_gaudi_ucm.graphs.warm_up.order import choose_skeleton
from vllm_gaudi_ucm.graphs.warm_up.warm_up import GraphRuns, WarmUp
entered, slow = threading.Event(), False
def run(key):
    if slow:
        entered.set()
        time.sleep(0.3)
        print("ran", flush=True)
warm_up = WarmUp(ReadyBuckets(BUCKETS), GraphRuns(run, run), lambda: 0, lambda progress: None)
warm_up.run_skeleton(choose_skeleton(BUCKETS, None, 1))
slow = True
IdleWarmUp(warm_up, AT_ONCE).start()
entered.wait()
"""


def test_exit_waits_for_the_graph_and_for_no_more(pytestconfig: pytest.Config) -> None:
    """Neither killed in the middle nor kept alive for what is left."""
    program = EXIT.format(root=str(pytestconfig.rootpath))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")
