"""The memory store: bounded, evicts the least recently used, one for all its users in a process."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest

from tests.store.blocks import BLOCK_BYTES, block, holds, key, loaded
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.store import memory as module
from vllm_gaudi_ucm.store.memory import MemoryStore
from vllm_gaudi_ucm.store.slot_pool import SlotPool


def test_capacity_evicts_the_least_recently_used() -> None:
    """Option capacity."""
    store = MemoryStore(BLOCK_BYTES, 3 * BLOCK_BYTES + 5)
    for number in range(3):
        assert store.save(key(number), block(number))
    assert loaded(store, 0) == block(0)
    assert store.save(key(1), block(1))
    assert store.save(key(3), block(3))
    assert holds(store, range(4)) == [0, 1, 3]
    stats = store.stats()
    assert (stats.blocks, stats.bytes, stats.evictions) == (3, 3 * BLOCK_BYTES, 1)
    assert stats.capacity == 3 * BLOCK_BYTES + 5
    store.check_integrity()


def test_a_capacity_below_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"store\.capacity: found 10 bytes, expected room for one block of 4096"):
        MemoryStore(BLOCK_BYTES, 10)
    with pytest.raises(ValueError, match="block_bytes: found 0"):
        MemoryStore(0, 10)


def test_a_block_that_is_read_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: C9. Evicting and deleting wait for readers: their slot is not given away."""
    store = MemoryStore(BLOCK_BYTES, 2 * BLOCK_BYTES)
    store.save(key(0), block(0))
    store.save(key(1), block(1))
    copyto, reading, go_on = np.copyto, threading.Event(), threading.Event()
    found: list[bytes | None] = []

    def slow_copy(target: np.ndarray, source: np.ndarray) -> None:
        if threading.current_thread() is reader:
            reading.set()
            assert go_on.wait(60)
        copyto(target, source)

    monkeypatch.setattr(module.np, "copyto", slow_copy)
    reader = threading.Thread(target=lambda: found.append(loaded(store, 0)))
    reader.start()
    assert reading.wait(60)
    store.save(key(2), block(2))  # evicts 1, though 0 is older: it is being read
    assert store.lookup([key(0), key(1), key(2)]) == [True, False, True]
    assert store.delete([key(0)]) == 1
    store.check_integrity()
    store.save(key(3), block(3))  # evicts 2: the slot of 0 is not free yet
    store.check_integrity()
    go_on.set()
    reader.join()
    assert found == [block(0)]
    store.check_integrity()
    store.save(key(4), block(4))
    assert holds(store, range(5)) == [3, 4]


def test_no_memory_is_an_unsaved_block(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(BLOCK_BYTES, 100 * BLOCK_BYTES)

    def nothing_left(pool: SlotPool, size: int) -> np.ndarray:
        raise MemoryError(f"{size} bytes")

    monkeypatch.setattr(SlotPool, "_new_slab", nothing_left)
    assert not store.save(key(1), block(1))
    assert store.stats().errors == 1
    monkeypatch.undo()
    assert store.save(key(1), block(1))


def test_memory_is_taken_as_it_fills() -> None:
    pool = SlotPool(1 << 20, 1 << 30, pinned=False)
    slots = [pool.take_slot() for _ in range(65)]
    assert slots == list(range(65))
    assert (pool.allocated, pool.free) == (128, 63)
    pool.view(64)[:] = 7
    pool.view(63)[:] = 5
    assert (pool.view(64) == 7).all()
    pool.give(3)
    assert pool.take_slot() == 3


def test_page_locked_memory_is_taken_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pool takes what the system has, and a later block tries again."""
    sizes: list[int] = []

    def slab(pool: SlotPool, size: int) -> np.ndarray:
        if len(sizes) == 2:
            raise RuntimeError("no more page-locked memory")
        sizes.append(size)
        return np.empty(size, np.uint8)

    monkeypatch.setattr(SlotPool, "_new_slab", slab)
    pool = SlotPool(1 << 20, 100 << 20, pinned=True)
    assert (sizes, pool.allocated, pool.free) == ([64 << 20, 36 << 20], 100, 100)
    assert [pool.take_slot() for _ in range(3)] == [0, 1, 2]

    sizes.clear()
    pool = SlotPool(1 << 20, 200 << 20, pinned=True)
    assert (pool.allocated, pool.free) == (128, 128)
    assert re.search(
        r"0.12 GiB of page-locked memory in .* s, the system has no more: no more page-locked", caplog.text
    )
    sizes.clear()
    assert [pool.take_slot() for _ in range(200)] == list(range(200))


def test_users_with_equal_options_share_one_store(open_one: Any) -> None:
    options = {"kind": "memory", "capacity": "1MiB"}
    one, two, other = open_one(options), open_one(options), open_one({"kind": "memory", "capacity": "2MiB"})
    one.save(key(1), block(1))
    assert holds(two, [1]) == [1]
    assert holds(other, [1]) == []
    one.close()
    assert holds(two, [1]) == [1]
    with pytest.raises(RuntimeError, match="closed"):
        one.lookup([key(1)])
    assert one.stats().saves == 1
    two.close()
    assert holds(open_one(options), [1]) == []


def test_pinning(open_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Option pin. Without a device `auto` takes ordinary memory, and `true` is refused."""
    monkeypatch.setenv("VLLM_GAUDI_UCM_DEVICE", "cpu")
    assert open_one({"kind": "memory"}).save(key(1), block(1))
    with pytest.raises(UcmConfigError, match=r"store\.pin: found true, expected false or auto"):
        open_one({"kind": "memory", "pin": True, "capacity": "1GiB"})


def test_pinned_slots_are_torchs_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    asked: list[dict[str, Any]] = []
    empty = torch.empty

    def recorded(*sizes: int, **traits: Any) -> Any:
        asked.append(traits)
        return empty(*sizes, dtype=traits["dtype"])

    monkeypatch.setattr(torch, "empty", recorded)
    store = MemoryStore(BLOCK_BYTES, 4 * BLOCK_BYTES, pinned=True)
    assert store.save(key(1), block(1))
    assert loaded(store, 1) == block(1)
    assert [traits["pin_memory"] for traits in asked] == [True]


def test_a_lent_block_is_not_overwritten() -> None:
    """covers: C9. It is lent where it lies; evicting and deleting leave it alone until it is given back."""
    store = MemoryStore(BLOCK_BYTES, 2 * BLOCK_BYTES)
    store.save(key(0), block(0))
    store.save(key(1), block(1))
    (loan,) = store.lend([key(0)])
    assert loan is not None
    with loan as lent:
        assert lent.readonly
        store.save(key(2), block(2))  # evicts 1, though 0 is older
        assert store.lookup([key(0), key(1), key(2)]) == [True, False, True]
        assert store.delete([key(0)]) == 1
        assert not store.save(key(3), block(3)) or store.lookup([key(2)]) == [False]
        store.check_integrity()
        assert lent == block(0)
    store.check_integrity()
    assert store.lend([key(0)]) == [None]
    stats = store.stats()
    assert (stats.hits, stats.bytes_loaded) == (1, BLOCK_BYTES)


def test_a_lent_block_outlasts_the_store() -> None:
    store = MemoryStore(BLOCK_BYTES, 2 * BLOCK_BYTES)
    store.save(key(0), block(0))
    (loan,) = store.lend([key(0)])
    assert loan is not None
    with loan as lent:
        store.close()
        assert lent == block(0)
    store.check_integrity()
    with pytest.raises(RuntimeError, match="closed"):
        store.lend([key(0)])
