"""How many threads are called for what there is to load."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.prefetch.conftest import MakeEngine
from tests.prefetch.lent_blocks import LendingStore
from tests.prefetch.stores import ScriptedStore, eventually, keys
from vllm_gaudi_ucm.prefetch.dispatcher import IdleThreads
from vllm_gaudi_ucm.prefetch.tasks import Deliver, PrefetchOutcome, PrefetchPriority


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})


def idle_threads(count: int, idle: int, store_waits: bool) -> IdleThreads:
    threads = IdleThreads(count, store_waits)
    for _ in range(idle):
        threads.join()
    return threads


@pytest.mark.parametrize(
    ("idle", "store_waits", "is_urgent", "share"),
    [(0, True, True, 12), (1, True, True, 6), (7, True, False, 3), (7, False, True, 3), (7, False, False, 4)],
)
def test_idle_threads_have_their_part(idle: int, store_waits: bool, is_urgent: bool, share: int) -> None:
    """As many as there are processors, and one less where the model needs it."""
    assert idle_threads(8, idle, store_waits).share(12, is_urgent) == share


@pytest.mark.parametrize(
    ("idle", "store_waits", "is_urgent", "called"),
    [
        (0, True, True, False),
        (1, True, False, True),
        (5, False, False, False),  # three are at it
        (6, False, False, True),
        (5, False, True, True),
        (4, False, True, False),
    ],
)
def test_who_is_called(idle: int, store_waits: bool, is_urgent: bool, called: bool) -> None:
    threads = idle_threads(8, idle, store_waits)
    threads.call_for_work(is_urgent, is_any_busy=True)
    waited = threading.Thread(target=threads.wait, daemon=True)
    waited.start()
    waited.join(5 if called else 0.05)
    assert waited.is_alive() is not called
    threads.call()
    waited.join(60)
    assert not waited.is_alive()


def test_the_only_thread_is_called_where_others_are_missing() -> None:
    threads = idle_threads(8, 1, store_waits=False)
    threads.call_for_work(is_urgent=False, is_any_busy=False)
    waited = threading.Thread(target=threads.wait, daemon=True)
    waited.start()
    waited.join(60)
    assert not waited.is_alive()


def test_a_store_that_waits_is_asked_by_every_thread(make_engine: MakeEngine) -> None:
    store = ScriptedStore(range(8), is_open=False)
    engine = make_engine(store, prefetch_workers=6)
    handle = engine.submit_prefetch("r", keys(*range(8)), PrefetchPriority.LOW)
    assert eventually(lambda: store.running == 6)
    store.gate.set()
    assert handle.wait(60) is PrefetchOutcome.READY


class HostStore(LendingStore):
    """Lends at once; what is delivered from it takes a processor."""

    waits = False


def test_prefetches_leave_a_processor_to_the_model(make_engine: MakeEngine) -> None:
    engine = make_engine(HostStore(range(20)), prefetch_workers=6)
    with busy_deliveries() as (running, deliver):
        low = engine.submit_prefetch("low", keys(*range(10)), PrefetchPriority.LOW, deliver)
        assert eventually(lambda: len(running) == 3)
        assert not eventually(lambda: len(running) > 3, 0.1)
        urgent = engine.submit_prefetch("urgent", keys(*range(10, 20)), PrefetchPriority.URGENT, deliver)
        assert eventually(lambda: len(running) == 4)
        assert not eventually(lambda: len(running) > 4, 0.1)
    assert low.wait(60) is PrefetchOutcome.READY
    assert urgent.wait(60) is PrefetchOutcome.READY


@contextmanager
def busy_deliveries() -> Iterator[tuple[set[int], Deliver]]:
    """The threads that have delivered, and a `deliver` that lasts until the context ends."""
    running: set[int] = set()
    gate = threading.Event()

    def deliver(index: int, block: memoryview) -> None:
        running.add(threading.get_ident())
        assert gate.wait(60)

    try:
        yield running, deliver
    finally:
        gate.set()
