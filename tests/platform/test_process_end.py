"""How an engine's process ends: everything is closed, in the time that it has for it."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi_ucm.connector.block_saver import BlockSaver
from vllm_gaudi_ucm.platform.worker import UcmWorker
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.vllm_api import engine_process


def test_a_part_that_fails_does_not_keep_the_others_open() -> None:
    """covers: F12"""
    closed = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            raise OSError(self.name)

    worker: Any = object.__new__(UcmWorker)
    worker.model_runner, worker._phase_log, worker._metrics = Part("runner"), Part("log"), Part("metrics")
    with pytest.raises(OSError, match="metrics"):
        worker.shutdown()
    assert closed == ["runner", "log", "metrics"]


def test_stores_have_the_time_that_they_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own time-out stays, and the engine aborts its requests at once. covers: F12"""
    name = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
    monkeypatch.setenv(name, "5")
    monkeypatch.delenv(name)
    needed = sum(
        inspect.signature(close).parameters["timeout"].default for close in (BlockSaver.close, PrefetchEngine.stop)
    )
    config: Any = SimpleNamespace(shutdown_timeout=0)
    engine_process.give_engine_time_to_stop(config)
    assert config.shutdown_timeout == int(os.environ[name]) > needed
    engine_process.abort_at_shutdown(config)
    assert config.shutdown_timeout == 0
    config.shutdown_timeout = 3
    engine_process.give_engine_time_to_stop(config)
    assert config.shutdown_timeout == 3


@pytest.mark.parametrize(("is_engine", "error"), [(True, SystemExit), (True, RuntimeError), (False, SystemExit)])
def test_only_an_engine_that_has_closed_everything_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, is_engine: bool, error: type[BaseException]
) -> None:
    """After an error it ends as usual, with the status of that."""
    registered: list[Callable[[], None]] = []
    statuses: list[int] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "EngineCore_DP0" if is_engine else "MainProcess")
    assert engine_process.is_engine_process() is is_engine
    worker: Any = object.__new__(UcmWorker)
    worker.model_runner = None
    engine_process.leave_heap_to_the_system(lambda: worker._status)
    for end in registered:
        end()
    assert not statuses
    with contextlib.suppress(error):
        try:
            raise error
        finally:
            worker.shutdown()
    for end in registered:
        end()
    assert statuses == [0] * (is_engine and error is SystemExit)


@pytest.mark.parametrize(("error", "status"), [(SystemExit(1), 1), (SystemExit(), 0), (None, 0), (OSError(), 0)])
def test_a_worker_tells_by_its_status_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, status: int
) -> None:
    """vLLM's executor has the errors that it catches already; one that ends the process is for its monitor."""
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "VllmWorker-1")
    worker: Any = object.__new__(UcmWorker)
    worker.model_runner = None
    with contextlib.suppress(SystemExit, OSError):
        try:
            if error is not None:
                raise error
        finally:
            worker.shutdown()
    assert worker._status == status


def test_a_users_own_handler_stays() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def handler(*_: object) -> None:
        raise AssertionError

    try:
        for mine in (handler, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, mine)
            engine_process.end_start_at_sigterm(engine_process.OF_SERVER)
            assert signal.getsignal(signal.SIGTERM) is mine
            engine_process.start_is_over()
            assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_vllm_gets_its_handler_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    noted = []

    def handler(number: int, frame: object) -> None:
        noted.append(number)

    handler.__qualname__ = engine_process.OF_ENGINE
    try:
        signal.signal(signal.SIGTERM, handler)
        engine_process.end_start_at_sigterm(engine_process.OF_ENGINE)
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)
        assert noted == [signal.SIGTERM]
        engine_process.start_is_over()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_engine_that_waits_hears_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that another thread takes does not end a wait of the main thread, as one right before it. covers: F12"""
    before = signal.getsignal(signal.SIGTERM)
    woken, waiting = threading.Event(), threading.Lock()
    waiting.acquire()

    def take() -> None:
        # once the main thread waits
        time.sleep(0.3)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    monkeypatch.setattr(multiprocessing.current_process(), "_name", "EngineCore_DP0")
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: (woken.set(), waiting.release()))
        engine_process.wake_at_sigterm()
        engine_process.wake_at_sigterm()
        other = threading.Thread(target=take)
        other.start()
        begin = time.monotonic()
        assert waiting.acquire(timeout=120)
        assert time.monotonic() - begin < 60
        assert woken.is_set()
        other.join()
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGURG, signal.SIG_DFL)
        os.close(signal.set_wakeup_fd(-1))


def test_vllm_has_the_handlers_that_ours_stand_in_for() -> None:
    """They are found by name: a release that calls them otherwise fails here, and not in a cluster."""
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine.core import EngineCoreProc

    for function, name in (
        (entry.run_server, engine_process.OF_SERVER),
        (EngineCoreProc.run_engine_core, engine_process.OF_ENGINE),
    ):
        owner, _, local = name.rpartition(".<locals>.")
        assert function.__qualname__ == owner
        code = inspect.unwrap(function).__code__
        assert local in {constant.co_name for constant in code.co_consts if inspect.iscode(constant)}
