"""Workers that are stopped or left behind, as real processes; looks follow each other without pauses."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import pytest

from vllm_gaudi_ucm.vllm_api.child_watch import LEFT_LOOKS, STOPPED_LOOKS, ChildWatch, _is_stopped

_CONTEXT = multiprocessing.get_context("fork")


class Workers:
    """Processes that sleep, named like vLLM's."""

    def __init__(self, *names: str) -> None:
        self.processes = [_CONTEXT.Process(target=time.sleep, args=(60,), name=name) for name in names]
        for process in self.processes:
            process.start()
        self.ended: list[str] = []
        self.watch = ChildWatch(
            lambda: [process for process in self.processes if process.is_alive()],  # type: ignore[misc]
            lambda engine: self.ended.append(engine.name),
        )

    def signal(self, index: int, number: int) -> None:
        process = self.processes[index]
        assert process.pid is not None
        os.kill(process.pid, number)
        if number == signal.SIGKILL:
            process.join(60)
        wanted, deadline = number == signal.SIGSTOP, time.monotonic() + 60
        while process.is_alive() and _is_stopped(process.pid) != wanted and time.monotonic() < deadline:
            time.sleep(0.01)

    def looks(self, count: int) -> None:
        for _ in range(count):
            self.watch.look()

    def exit_statuses(self) -> list[int | None]:
        """None: still running, half a second later."""
        for process in self.processes:
            process.join(0.5)
        return [process.exitcode for process in self.processes]


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("VllmWorker-0", "VllmWorker-1", "another")
    yield workers
    for process in workers.processes:
        process.kill()
        process.join()


def test_a_stopped_worker_is_killed(workers: Workers) -> None:
    workers.signal(1, signal.SIGSTOP)
    workers.signal(2, signal.SIGSTOP)  # not vLLM's
    workers.looks(STOPPED_LOOKS - 1)
    assert workers.exit_statuses() == [None, None, None]
    workers.looks(1)
    assert workers.exit_statuses() == [None, -signal.SIGKILL, None]


def test_workers_of_another_engine_go_on() -> None:
    """In a script with two engines."""
    workers = Workers("VllmWorker-0", "VllmWorker-1", "VllmWorker-0", "VllmWorker-1")
    try:
        workers.looks(1)
        workers.signal(1, signal.SIGKILL)
        workers.looks(LEFT_LOOKS + 1)
        assert workers.exit_statuses() == [None, -signal.SIGKILL, None, None]
    finally:
        for process in workers.processes:
            process.kill()


def test_one_that_goes_on_is_not(workers: Workers) -> None:
    for _ in range(2):
        workers.signal(1, signal.SIGSTOP)
        workers.looks(STOPPED_LOOKS - 1)
        workers.signal(1, signal.SIGCONT)
        workers.looks(1)
    assert workers.exit_statuses() == [None, None, None]


@pytest.mark.parametrize(("number", "left"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, None)])
def test_one_that_died_takes_the_others_along(workers: Workers, number: int, left: int | None) -> None:
    """Not where it was asked to end: the others have their time."""
    workers.looks(1)
    workers.signal(1, number)
    workers.processes[1].join(60)
    workers.looks(LEFT_LOOKS - 1)
    assert workers.exit_statuses() == [None, -number, None]
    workers.looks(1)
    assert workers.exit_statuses() == [left, -number, None]


@pytest.fixture
def engines() -> Iterator[Workers]:
    engines = Workers("EngineCore_DP0", "EngineCore_DP1", "another")
    yield engines
    for process in engines.processes:
        process.kill()
        process.join()


def test_an_engine_that_was_killed_is_reported_once(engines: Workers) -> None:
    """Its callers wait for a queue that stays empty."""
    engines.looks(1)
    assert engines.watch.failed() == []
    engines.signal(1, signal.SIGKILL)
    assert engines.watch.failed() == ["EngineCore_DP1"]
    engines.looks(3)
    assert engines.ended == ["EngineCore_DP1"]
    assert engines.watch.failed() == ["EngineCore_DP1"]


def test_an_engine_that_was_asked_to_end_has_not_failed(engines: Workers) -> None:
    engines.looks(1)
    engines.signal(0, signal.SIGTERM)
    engines.processes[0].join(60)
    engines.looks(1)
    assert engines.ended == ["EngineCore_DP0"]
    assert engines.watch.failed() == []
