"""The engine's threads start, stop, start again, are replaced, and never keep the interpreter alive."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from tests.conftest import ROOT
from tests.prefetch.conftest import MakeEngine
from tests.prefetch.stores import BLOCK_BYTES, ScriptedStore, eventually, key, keys
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome


def engine_threads() -> int:
    return sum(thread.name.startswith("ucm-prefetch-") for thread in threading.enumerate())


def test_stop_cancels_and_ends_the_threads_and_start_begins_again(make_engine: MakeEngine) -> None:
    """covers: C2"""
    before = engine_threads()
    store = ScriptedStore(range(8), is_open=False)
    engine = make_engine(store, prefetch_workers=2)
    engine.start()
    assert engine.stats().threads == 2
    handle = engine.submit_prefetch("r", keys(0, 1, 2))
    assert eventually(lambda: store.running == 2)
    assert not engine.stop(0.01), "two threads are in the store"
    assert handle.outcome is PrefetchOutcome.CANCELLED
    assert engine.submit_prefetch("late", keys(3)).outcome is PrefetchOutcome.CANCELLED
    engine.start()
    store.gate.set()
    assert engine.submit_prefetch("new", keys(3)).wait(60) is PrefetchOutcome.READY
    assert eventually(lambda: engine.stats().threads == 2)
    for _ in range(3):
        assert engine.stop(5)
        assert engine.stop(5)
        assert engine_threads() == before
        assert engine.stats().cache_bytes == 0
        engine.start()
        assert engine.submit_prefetch("new", keys(3)).wait(60) is PrefetchOutcome.READY


def test_idle_threads_are_woken_by_stop() -> None:
    """covers: C2"""
    engine = PrefetchEngine(ScriptedStore(), BLOCK_BYTES, PrefetchOptions())
    assert engine.stop(), "before it was ever started"
    engine.start()
    assert engine.stop(5)


def test_a_thread_that_dies_loses_its_block_and_is_replaced(make_engine: MakeEngine) -> None:
    store = ScriptedStore(range(8))
    store.errors[key(1)] = SystemExit()
    engine = make_engine(store, prefetch_workers=1)
    handle = engine.submit_prefetch("r", keys(0, 1, 2))
    assert handle.wait(60) is PrefetchOutcome.FAILED
    assert handle.failed == {1}
    assert engine.stats().threads_replaced == 1
    assert engine.submit_prefetch("next", keys(1)).wait(60) is PrefetchOutcome.READY


def test_a_thread_that_dies_in_deliver_is_replaced(make_engine: MakeEngine) -> None:
    """covers: C9"""
    engine = make_engine(ScriptedStore(range(8)), prefetch_workers=1)

    def deliver(index: int, block: memoryview) -> None:
        raise SystemExit

    handle = engine.submit_prefetch("r", keys(0), deliver=deliver)
    assert handle.wait(60) is PrefetchOutcome.FAILED
    assert engine.drain("r", 5)
    assert engine.submit_prefetch("next", keys(0, 1)).wait(60) is PrefetchOutcome.READY
    assert engine.stats().threads_replaced == 1


def test_threads_enter_the_device() -> None:
    entered: list[str] = []

    def enter() -> None:
        entered.append(threading.current_thread().name)
        raise RuntimeError("no device")

    engine = PrefetchEngine(ScriptedStore([0]), BLOCK_BYTES, PrefetchOptions(prefetch_workers=3), enter_thread=enter)
    engine.start()
    assert engine.submit_prefetch("r", keys(0)).wait(60) is PrefetchOutcome.READY
    assert engine.stop(5)
    assert len(set(entered)) == 3


def test_host_memory_is_the_callers() -> None:
    made: list[int] = []

    def allocate(nbytes: int) -> memoryview:
        made.append(nbytes)
        if len(made) == 1:
            raise MemoryError
        return memoryview(bytearray(nbytes))

    engine = PrefetchEngine(ScriptedStore(range(9)), BLOCK_BYTES, PrefetchOptions(), allocate=allocate)
    engine.start()
    assert engine.submit_prefetch("r", keys(0)).wait(60) is PrefetchOutcome.FAILED
    assert engine.submit_prefetch("r", keys(0)).wait(60) is PrefetchOutcome.READY
    engine.check_integrity()
    assert engine.stop(5)
    assert made == [BLOCK_BYTES] * 2


def test_an_engine_that_nobody_holds_ends_its_threads() -> None:
    before = engine_threads()
    engine = PrefetchEngine(ScriptedStore([0]), BLOCK_BYTES, PrefetchOptions())
    engine.start()
    assert engine.submit_prefetch("r", keys(0)).wait(60) is PrefetchOutcome.READY
    assert engine_threads() > before
    del engine
    gc.collect()
    assert eventually(lambda: engine_threads() == before)


def test_the_interpreter_ends_while_a_store_hangs() -> None:
    """covers: C2"""
    program = (
        "from tests.prefetch.stores import *\n"
        "from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine\n"
        "from vllm_gaudi_ucm.prefetch.options import PrefetchOptions\n"
        "store = ScriptedStore(is_open=False)\n"
        "engine = PrefetchEngine(store, 64, PrefetchOptions())\n"
        "engine.start()\n"
        "engine.submit_prefetch('r', keys(1, 2))\n"
        "assert eventually(lambda: store.running == 2)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_that_cannot_be_started_are_started_later(make_engine: MakeEngine) -> None:
    """covers: C2. The system may have none left for a while."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        engine = make_engine(ScriptedStore(range(2)), prefetch_workers=2)
        assert engine.submit_prefetch("early", keys(0)).wait(0.05) is PrefetchOutcome.TIMEOUT
        assert engine.stats().threads == 0
    assert threading.Thread.start is start
    assert engine.submit_prefetch("late", keys(0, 1)).wait(60) is PrefetchOutcome.READY
    assert engine.stats().threads == 2
