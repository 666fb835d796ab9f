"""Copies of blocks, and stores that are slow or fail."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.memory_mode.copies import BLOCK_BYTES, block, wait_for
from tests.observability.exposition import scrape
from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.memory_mode.copies import CopyStore
from vllm_gaudi_ucm.observability.metrics_file import make_private
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
from vllm_gaudi_ucm.prefetch.engine import host_memory
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.start.sparse_setup import open_copies
from vllm_gaudi_ucm.store.factory import open_store
from vllm_gaudi_ucm.store.memory import MemoryStoreOptions


def copies_of(store: dict[str, Any]) -> CopyStore:
    """As an engine with room for four copies opens them."""
    mode = {"enabled": True, "store": {**store, "capacity": 4 * BLOCK_BYTES}}
    blocks: Any = SimpleNamespace(block_bytes=BLOCK_BYTES, allocate=host_memory)
    return open_copies(resolve_config({"ucm": {"ucm_sparse_method": "GSA", "memory_mode": mode}}), 4, blocks)


def copies_in_memory(metrics: StepMetrics | None = None) -> CopyStore:
    store = open_store(MemoryStoreOptions(capacity=10 * BLOCK_BYTES, pin=False), BLOCK_BYTES)
    return CopyStore(store, BLOCK_BYTES, host_memory, PrefetchOptions(prefetch_cache_size=2), metrics=metrics)


@pytest.fixture
def copies() -> CopyStore:
    return copies_in_memory()


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
    """covers: C5. A later request of the same id, or a resumed one, is another generation."""
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
    """covers: C6 C7 C9. A generation ends while its save and its load are under way."""
    free = threading.Event()
    save, lend = copies.store.save, copies.store.lend
    monkeypatch.setattr(copies.store, "save", lambda *a: free.wait(60) and save(*a))
    monkeypatch.setattr(copies.store, "lend", lambda *a: free.wait(60) and lend(*a))
    begin = time.monotonic()
    copies.save((1, 0), block(1))
    copies.load((1, 1))
    assert not list(copies.finished_saves())
    assert not list(copies.finished_loads())
    copies.end(1)
    assert time.monotonic() - begin < 20
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


def test_figures_on_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    make_private(folder)
    copies = copies_in_memory(StepMetrics(folder))
    copies.save((1, 5), block(7))
    assert wait_for(copies.finished_saves)
    copies.load((1, 5))
    assert wait_for(copies.finished_loads)
    copies.close()
    seen = scrape(folder)
    assert seen['gaudi_ucm_store_events_total{engine="0",event="saves",store="memory_mode"}'] == 1
    assert seen['gaudi_ucm_store_events_total{engine="0",event="hits",store="memory_mode"}'] == 1
    assert seen['gaudi_ucm_prefetches_total{engine="0",outcome="ready",use="memory_mode"}'] == 1


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("seed", range(3))
def test_a_copy_is_there_for_as_long_as_it_is_wanted(kind: str, seed: int, tmp_path: Path) -> None:
    """covers: C5 C8 F7. Conservation: a copy once reported stays until it is dropped or its request ends, whoever reads
    copies that are dropped meanwhile, and whatever the store could not delete. As many are wanted as there is room
    for; one that has no room is not made, which is said. Once readers and faults have gone there is room again."""
    rng = random.Random(seed)
    outside = {"path": str(tmp_path / "kv"), "fsync": False, "deadline": 10.0, "breaker": {"failures": 1000}}
    copies = copies_of({"kind": kind, **(outside if kind == "file" else {"pin": False})})
    delete, broken = copies.store.delete, [False]
    copies.store.delete = lambda keys: 0 if broken[0] else delete(keys)  # type: ignore[method-assign]
    wanted: dict[tuple[int, int], int] = {}
    readers: list[Any] = []
    refused = 0

    def save(pair: tuple[int, int]) -> bool:
        copies.save(pair, block(pair[1] % 256))
        ((saved, is_there),) = wait_for(copies.finished_saves)
        assert saved == pair
        if is_there:
            wanted[pair] = pair[1] % 256
        return bool(is_there)

    for number in range(300):
        broken[0] = rng.random() < 0.2
        if len(wanted) < 4:
            refused += not save((rng.randrange(3), number))
        if wanted and rng.random() < 0.3:
            loans = copies.store.lend([copies._key(rng.choice(list(wanted)))])
            assert loans is not None
            (loan,) = loans
            assert loan is not None
            loan.__enter__()
            readers.append(loan)
        if wanted and rng.random() < 0.6:
            pair = rng.choice(list(wanted))
            del wanted[pair]
            copies.drop(pair)
        if rng.random() < 0.1:
            generation = rng.randrange(3)
            copies.end(generation)
            wanted = {pair: value for pair, value in wanted.items() if pair[0] != generation}
        while readers and rng.random() < 0.4:
            readers.pop(rng.randrange(len(readers))).__exit__(None, None, None)
        for pair, value in wanted.items():
            into = bytearray(BLOCK_BYTES)
            assert copies.store.load(copies._key(pair), memoryview(into)), "the only copy has gone"
            assert into == block(value)
    assert refused
    assert copies.store.stats().evictions == 0
    broken[0] = False
    for loan in readers:
        loan.__exit__(None, None, None)
    for generation in range(3):
        copies.end(generation)
    copies.save((4, 0), block(1))
    assert wait_for(copies.finished_saves)
    copies.end(4)
    wanted = {}
    for number in range(4):
        assert save((5, number)), "there is room again"
    copies.end(5)
    copies.check_idle()
    copies.close()


def test_without_host_memory_a_block_does_not_come_back(copies: CopyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: F7 C8. That is a load that failed."""

    def nothing_left(nbytes: int) -> memoryview:
        raise MemoryError(f"{nbytes} bytes")

    copies.save((1, 0), block(7))
    assert wait_for(copies.finished_saves)
    with monkeypatch.context() as patched:
        patched.setattr(copies._loads, "_allocate", nothing_left)
        copies.load((1, 0))
        copies.load((2, 0))
    copies.end(2)
    assert list(copies.finished_loads()) == [((1, 0), None)]
    copies.load((1, 0))
    assert wait_for(copies.finished_loads) == [((1, 0), block(7))]
    copies.end(1)
    copies.check_idle()
    copies.close()
