"""Copies of blocks, and stores that are slow or fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.observability.exposition import scrape
from vllm_gaudi_ucm.kv_offload.copy_store import CopyStore
from vllm_gaudi_ucm.observability.folder import make_private
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
from vllm_gaudi_ucm.prefetch.engine import host_memory
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.store.factory import open_store
from vllm_gaudi_ucm.store.options import MemoryStoreOptions

BLOCK_BYTES = 64


def wait_for(finished: Callable[[], Sequence[tuple[object, object]]]) -> list[tuple[object, object]]:
    end = time.monotonic() + 5
    found: list[tuple[object, object]] = []
    while not found and time.monotonic() < end:
        found = list(finished())
        time.sleep(0.001)
    return found


@pytest.fixture
def copies() -> CopyStore:
    store = open_store(MemoryStoreOptions(capacity=10 * BLOCK_BYTES, pin=False), BLOCK_BYTES)
    return CopyStore(store, BLOCK_BYTES, host_memory, PrefetchOptions(prefetch_cache_size=2))


def block(value: int) -> memoryview:
    return memoryview(bytes([value]) * BLOCK_BYTES)


def test_saved_and_loaded(copies: CopyStore) -> None:
    copies.save((1, 5), block(7))
    assert wait_for(copies.finished_saves) == [((1, 5), True)]
    copies.load((1, 5))
    ((pair, data),) = wait_for(copies.finished_loads)
    assert pair == (1, 5)
    assert data == block(7)
    copies.end(1)
    copies.check_idle()
    assert copies.store.stats().blocks == 0
    copies.close()


def test_lives_do_not_see_each_other(copies: CopyStore) -> None:
    """covers: C5. A later request of the same id, or a resumed one, is another life."""
    copies.save((1, 0), block(1))
    assert wait_for(copies.finished_saves)
    copies.load((2, 0))
    assert wait_for(copies.finished_loads) == [((2, 0), None)]
    copies.close()


def test_a_copy_that_is_gone_is_a_failed_load(copies: CopyStore) -> None:
    """covers: C8"""
    copies.save((1, 0), block(1))
    assert wait_for(copies.finished_saves)
    copies.store.clear()
    copies.load((1, 0))
    assert wait_for(copies.finished_loads) == [((1, 0), None)]
    copies.close()


def test_a_dropped_copy_is_deleted(copies: CopyStore) -> None:
    copies.save((1, 0), block(1))
    copies.save((1, 1), block(2))
    while len(list(copies.finished_saves())) == 0:
        time.sleep(0.001)
    copies.drop((1, 0))
    copies.load((1, 0))
    assert wait_for(copies.finished_loads)[0][0] == (1, 0)
    copies.end(1)
    copies.check_idle()
    copies.close()


def test_nobody_waits_for_a_store_that_hangs(copies: CopyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: C6 C7 C9. A life ends while its save and its load are under way."""
    free = threading.Event()
    save, lend = copies.store.save, copies.store.lend
    monkeypatch.setattr(copies.store, "save", lambda *a: free.wait(5) and save(*a))
    monkeypatch.setattr(copies.store, "lend", lambda *a: free.wait(5) and lend(*a))
    begin = time.monotonic()
    copies.save((1, 0), block(1))
    copies.load((1, 1))
    assert not list(copies.finished_saves())
    assert not list(copies.finished_loads())
    copies.end(1)
    assert time.monotonic() - begin < 1
    free.set()
    copies.check_idle()
    assert not list(copies.finished_loads())
    copies.close()
    assert copies.store.stats().blocks == 0


def test_a_store_that_raises(copies: CopyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: D5"""

    def broken(*args: object) -> bool:
        raise OSError("no medium")

    monkeypatch.setattr(copies.store, "save", broken)
    monkeypatch.setattr(copies.store, "lend", broken)
    copies.save((1, 0), block(1))
    assert wait_for(copies.finished_saves) == [((1, 0), False)]
    copies.load((1, 0))
    assert wait_for(copies.finished_loads) == [((1, 0), None)]
    copies.close()


def test_no_thread_is_left(copies: CopyStore) -> None:
    before = threading.active_count()
    copies.save((1, 0), block(1))
    copies.close()
    assert threading.active_count() < before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ucm-memory-mode")]


def test_figures_on_metrics(copies: CopyStore, tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    make_private(folder)
    copies.report_to(StepMetrics(folder))
    copies.save((1, 5), block(7))
    assert wait_for(copies.finished_saves)
    copies.load((1, 5))
    assert wait_for(copies.finished_loads)
    copies.close()
    seen = scrape(folder)
    assert seen['gaudi_ucm_store_events_total{engine="0",event="saves",store="memory_mode"}'] == 1
    assert seen['gaudi_ucm_store_events_total{engine="0",event="hits",store="memory_mode"}'] == 1
    assert seen['gaudi_ucm_prefetches_total{engine="0",outcome="ready",use="memory_mode"}'] == 1
