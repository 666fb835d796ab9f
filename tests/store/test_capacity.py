"""Bounded stores under many threads and several engines: the bound holds, and the books agree with what is there."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.blocks import BLOCK_BYTES, block, holds, key, loaded
from vllm_gaudi_ucm.store.file import FileMedium

BLOCKS = 8
CAPACITY = BLOCKS * BLOCK_BYTES


@pytest.fixture(params=["memory", "file"])
def bounded(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "memory":
        return {"kind": "memory", "capacity": CAPACITY, "pin": False}
    return {"kind": "file", "path": str(tmp_path / "s"), "capacity": CAPACITY, "deadline": 20.0, "fsync": False}


def test_many_threads_in_little_room(bounded: dict[str, Any], open_one: Any) -> None:
    """covers: C5. The bound holds at every moment, also with four writes on their way."""
    store = open_one(bounded)
    end = time.monotonic() + 1.5
    wrong: list[int] = []
    most = [0]

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while time.monotonic() < end:
            number = int(rng.integers(30))
            if rng.random() < 0.5:
                store.save(key(number), block(number))
            elif loaded(store, number) not in (None, block(number)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        store.check_integrity()
        most[0] = max(most[0], store.stats().bytes)
        time.sleep(0.005)
    assert wrong == []
    assert most[0] <= CAPACITY
    stats = store.stats()
    there = holds(store, range(30))
    assert (len(there), len(there) * BLOCK_BYTES) == (stats.blocks, stats.bytes)
    assert stats.saves - stats.evictions == stats.blocks
    assert (stats.timeouts, stats.corrupt) == (0, 0)
    assert 0 < len(there) <= BLOCKS


def test_running_engines_keep_to_the_bound_together(
    tmp_path: Path, open_one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees what the other has written by the upkeep that its own use begins; no restart is needed."""
    monkeypatch.setattr(FileMedium, "upkeep_seconds", 0.02)
    options = {"kind": "file", "path": str(tmp_path / "s"), "capacity": CAPACITY, "deadline": 20.0, "fsync": False}
    one, two = open_one(options), open_one(options)
    for number in range(BLOCKS):
        assert one.save(key(number), block(number))
        assert two.save(key(100 + number), block(100 + number))

    def files() -> int:
        return len(list((tmp_path / "s").rglob("*.kv")))

    def is_settled() -> bool:
        """Asked as one: each index may be between two looks at the folder, right in number and wrong in its blocks."""
        mine, other = one.stats(), two.stats()
        evictions = mine.evictions + other.evictions
        return files() <= BLOCKS <= evictions and mine.bytes == other.bytes == CAPACITY

    end = time.monotonic() + 60
    while not is_settled():
        assert time.monotonic() < end, (one.stats(), two.stats())
        time.sleep(0.01)
    assert files() == BLOCKS
    assert one.stats().evictions + two.stats().evictions == BLOCKS
    one.check_integrity()
    two.check_integrity()


@pytest.mark.parametrize("failures", [1, 4])
def test_failures_in_a_row_option(tmp_path: Path, open_one: Any, failures: int) -> None:
    """Option breaker.failures, over a real folder that cannot be used any more."""
    options = {"kind": "file", "path": str(tmp_path / "s"), "deadline": 20.0, "breaker": {"failures": failures}}
    store = open_one(options)
    store.save(key(1), block(1))
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "s").symlink_to(tmp_path)
    for count in range(failures):
        assert store.stats().breaker == "closed", count
        assert loaded(store, 1) is None
    assert store.stats().breaker == "open"


@pytest.mark.parametrize("kind", ["memory", "file", "tiered"])
def test_the_end_of_a_used_prompt_leaves_first(kind: str, tmp_path: Path, open_one: Any) -> None:
    """Blocks that are not there are not used, and none comes back."""
    options = {"kind": "memory", "capacity": CAPACITY, "pin": False}
    if kind != "memory":
        behind = {"kind": "file", "path": str(tmp_path / "s"), "capacity": CAPACITY, "deadline": 20.0, "fsync": False}
        options = behind if kind == "file" else {"kind": "tiered", "front": options, "behind": behind}
    store = open_one(options)
    for number in range(BLOCKS):
        assert store.save(key(number), block(number))
    store.use([key(number) for number in (0, 1, 2, 3, 99)])
    store.use([key(number) for number in (4, 5, 6, 7)])
    for number in range(20, 25):
        assert store.save(key(number), block(number))
    assert holds(store, range(30)) == [4, 5, 6, 20, 21, 22, 23, 24]
    store.check_integrity()
