"""GSA's prefetch options in memory mode: what each of them changes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.memory_mode.fake_worker import FakeWorker
from tests.memory_mode.prefetch import config_of
from tests.memory_mode.scheduler_side import run_step, scheduler_of
from tests.scheduler.schedulers import request
from vllm_gaudi_ucm.config.ucm_config import blocks_ahead, idle_options, memory_mode_prefetch, resolve_config
from vllm_gaudi_ucm.memory_mode.copies import CopyStore
from vllm_gaudi_ucm.prefetch.engine import host_memory
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.stats import PrefetchStats
from vllm_gaudi_ucm.store.factory import open_store
from vllm_gaudi_ucm.store.file import FileStoreOptions

BLOCK_BYTES = 64
COPIES = [(1, number) for number in range(4)]


def test_options_of_gsa_reach_the_engine(tmp_path: Path) -> None:
    """covers: C4. Never more host memory than for the moves of two steps and the blocks ahead."""
    files = {"kind": "file", "path": str(tmp_path)}
    found = memory_mode_prefetch(config_of(store=files, prefetch_workers=9, max_pending_prefetch=7, prefetch_ahead=3))
    assert (found.prefetch_workers, found.max_pending_prefetch) == (9, 7)
    assert found.prefetch_cache_size == (2 + 3) * 8
    assert memory_mode_prefetch(config_of(store=files, prefetch_cache_size=5)).prefetch_cache_size == 5
    assert memory_mode_prefetch(config_of("ESA", files, prefetch_workers=9)).prefetch_workers == 4


@pytest.mark.parametrize(("ahead", "moves", "most"), [(0, 8, 0), (1, 8, 8), (3, 2, 6)])
def test_prefetch_ahead_counts_steps_of_moves(tmp_path: Path, ahead: int, moves: int, most: int) -> None:
    """covers: C4. Copies in host memory are near enough."""
    files = {"kind": "file", "path": str(tmp_path)}
    assert blocks_ahead(config_of(store=files, moves=moves, prefetch_ahead=ahead)) == most
    assert blocks_ahead(config_of(moves=moves, prefetch_ahead=ahead)) == 0


def test_idle_options(tmp_path: Path) -> None:
    """covers: C4. With copies in host memory only the threads have something to do."""
    options = {"prefetch_workers": 9, "max_pending_prefetch": 7, "prefetch_ahead": 3, "prefetch_cache_size": 5}
    assert idle_options(config_of(store={"kind": "file", "path": str(tmp_path)}, **options)) == []
    assert idle_options(config_of(**options)) == ["max_pending_prefetch", "prefetch_ahead", "prefetch_cache_size"]
    off = resolve_config({"ucm": {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": options}}})
    assert idle_options(off) == list(options)
    assert idle_options(config_of(prefetch_cache_bytes=1 << 20)) == ["prefetch_cache_bytes"]


@pytest.mark.parametrize("ahead", [0, 2])
def test_blocks_that_wait_for_their_turn_come_nearer(tmp_path: Path, ahead: int) -> None:
    """Too much is missed, so that everything comes back, two blocks a step; the next ones are named before."""
    scheduler = scheduler_of(
        tmp_path,
        caching=False,
        max_missed=0.3,
        moves_per_step=2,
        store={"kind": "file", "path": str(tmp_path / "kv")},
        prefetch={"prefetch_ahead": ahead},
    )
    worker = FakeWorker(random.Random(0))
    scheduler.add_request(request("a", 160, max_tokens=80))
    named: set[tuple[int, int]] = set()
    most, loads = 0, []
    for _ in range(70):
        orders = run_step(scheduler, worker).ucm_sparse_meta.offload
        loads += [((move.generation, move.number) in named) for move in orders.loads]
        assert not named & set(orders.dropped)
        named = set(orders.ahead)
        most = max(most, len(named))
    assert most == 2 * ahead
    assert sum(loads) > 10 if ahead else not any(loads)
    assert not named, "nothing is away in the end"


@pytest.fixture
def copies_of(tmp_path: Path) -> Iterator[Callable[..., CopyStore]]:
    """Four copies in files, by an engine of such options."""
    made: list[CopyStore] = []

    def make(**options: int) -> CopyStore:
        store = open_store(FileStoreOptions(path=tmp_path / "kv", fsync=False, deadline=5.0), BLOCK_BYTES)
        copies = CopyStore(store, BLOCK_BYTES, host_memory, PrefetchOptions(**options))
        made.append(copies)
        for pair in COPIES:
            copies.save(pair, memoryview(bytes([pair[1]]) * BLOCK_BYTES))
        saved = 0
        while saved < len(COPIES):
            saved += len(list(copies.finished_saves()))
        return copies

    yield make
    for copies in made:
        copies.close()


def settled(copies: CopyStore) -> PrefetchStats:
    """Figures once nothing is under way."""
    end = time.monotonic() + 60
    while (stats := copies._engine.stats()).pending and time.monotonic() < end:
        time.sleep(0.001)
    return stats


def test_a_load_finds_what_came_near(copies_of: Callable[..., CopyStore]) -> None:
    copies = copies_of()
    copies.bring_near(COPIES[:2])
    settled(copies)
    read = copies.store.stats().hits
    copies.load(COPIES[0])
    copies.bring_near([])
    settled(copies)
    ((pair, data),) = copies.finished_loads()
    assert pair == COPIES[0]
    assert data == bytes(BLOCK_BYTES)
    assert copies.store.stats().hits == read == 2
    copies.end(1)
    copies.check_idle()


@pytest.mark.parametrize(("size", "kept"), [(2, 2), (8, 4)])
def test_prefetch_cache_size(copies_of: Callable[..., CopyStore], size: int, kept: int) -> None:
    """covers: C4. What it has no room for is loaded when its turn comes."""
    copies = copies_of(prefetch_cache_size=size)
    copies.bring_near(COPIES)
    assert settled(copies).cache_blocks == kept
    copies.load(COPIES[3])
    settled(copies)
    ((_, data),) = copies.finished_loads()
    assert data == bytes([3]) * BLOCK_BYTES


@pytest.mark.parametrize(("most", "shed"), [(1, 3), (4, 0)])
def test_max_pending_prefetch(
    copies_of: Callable[..., CopyStore], monkeypatch: pytest.MonkeyPatch, most: int, shed: int
) -> None:
    """covers: C4. While the store hangs, nothing more than this is brought nearer; loads are not held up."""
    copies = copies_of(max_pending_prefetch=most)
    free, lend = threading.Event(), copies.store.lend
    monkeypatch.setattr(copies.store, "lend", lambda *a: free.wait(60) and lend(*a))
    copies.bring_near(COPIES)
    assert copies._engine.stats().shed == shed
    copies.load(COPIES[3])
    assert copies._engine.stats().shed == shed
    free.set()
    settled(copies)
    assert [pair for pair, data in copies.finished_loads() if data is not None] == COPIES[3:]


@pytest.mark.parametrize("workers", [1, 3])
def test_prefetch_workers(copies_of: Callable[..., CopyStore], monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """covers: C4. So many blocks are read at once."""
    copies = copies_of(prefetch_workers=workers)
    lock, lend, all_read = threading.Lock(), copies.store.lend, threading.Event()
    reading, most = 0, 0

    def watched(*args: Any) -> Any:
        nonlocal reading, most
        with lock:
            reading += 1
            most = max(most, reading)
        if most == workers:
            all_read.set()
        # however late the last of them is; then some time for one too many
        assert all_read.wait(60)
        time.sleep(0.05)
        with lock:
            reading -= 1
        return lend(*args)

    monkeypatch.setattr(copies.store, "lend", watched)
    for pair in COPIES:
        copies.load(pair)
    settled(copies)
    assert most == workers
