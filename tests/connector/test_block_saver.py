"""The queue between step and store: bounded, never waited for, and honest about what was not stored."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.connector.fault_store import FaultStore
from vllm_gaudi_ucm.connector.block_saver import BlockSaver, SaveQueue
from vllm_gaudi_ucm.connector.metadata import BlockSave
from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.device.step_activity import StepActivity
from vllm_gaudi_ucm.kv_cache.device_blocks import DeviceBlocks
from vllm_gaudi_ucm.kv_cache.pair import KvPair


@pytest.fixture
def cache() -> KvPair:
    """8 blocks of 2 tokens, full of their numbers."""
    rows = torch.arange(8.0).repeat_interleave(2)[:, None, None]
    return KvPair(rows.expand(16, 1, 3).contiguous(), rows.expand(16, 1, 3).contiguous())


@pytest.fixture
def blocks(cache: KvPair) -> DeviceBlocks:
    return DeviceBlocks({"layer": cache}, 2, get_device("cpu"))


def saves(*block_ids: int) -> list[BlockSave]:
    return [BlockSave(bytes([block_id]) * 32, block_id) for block_id in block_ids]


def saver_of(store: FaultStore, blocks: DeviceBlocks, capacity: int, workers: int) -> BlockSaver:
    return BlockSaver(store, blocks, SaveQueue(capacity, 1.0, StepActivity()), workers)


def stored(store: FaultStore) -> dict[int, float]:
    return {
        key[0]: float(torch.frombuffer(bytearray(block), dtype=torch.float32)[0]) for key, block in store.blocks.items()
    }


def test_page_locked_buffers_are_taken_at_start(blocks: DeviceBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a small queue's. Saves then allocate nothing, and every place is free."""
    sizes: list[int] = []

    def allocate(blocks: DeviceBlocks, nbytes: int) -> memoryview:
        sizes.append(nbytes)
        return memoryview(bytearray(nbytes))

    monkeypatch.setattr(type(blocks.device), "pins_host_memory", True)
    monkeypatch.setattr(DeviceBlocks, "allocate", allocate)
    saver = saver_of(FaultStore(), blocks, capacity=5, workers=1)
    assert sizes == [blocks.block_bytes] * 5
    saver.submit(saves(1, 2, 3, 4, 5))
    assert saver.flush(60.0)
    assert len(sizes) == 5
    assert saver.counts().saved == 5
    saver.close()
    saver.check_integrity()


def test_blocks_are_copied_before_they_may_change(blocks: DeviceBlocks, cache: KvPair) -> None:
    """covers: C9. The step after may write them while the store is still busy."""
    store = FaultStore()
    store.goes_on.clear()
    saver = saver_of(store, blocks, capacity=8, workers=2)
    saver.submit(saves(1, 5, 2))
    for rows in cache:
        rows.fill_(torch.nan)
    store.goes_on.set()
    assert saver.flush(60.0)
    assert stored(store) == {1: 1.0, 5: 5.0, 2: 2.0}
    assert saver.take_unsaved() == []
    saver.close()
    saver.check_integrity()


@pytest.mark.parametrize("capacity", [1, 3])
def test_what_the_queue_has_no_room_for_is_dropped_at_once(blocks: DeviceBlocks, capacity: int) -> None:
    """covers: C4"""
    store = FaultStore()
    store.goes_on.clear()
    saver = saver_of(store, blocks, capacity, workers=1)
    start = time.monotonic()
    saver.submit(saves(0, 1, 2, 3, 4))
    saver.submit(saves(5))
    assert time.monotonic() - start < 10
    dropped = saves(0, 1, 2, 3, 4, 5)[capacity:]
    assert saver.take_unsaved() == [save.key for save in dropped]
    assert saver.counts().dropped == len(dropped)
    store.goes_on.set()
    assert saver.flush(60.0)
    saver.submit(saves(6))
    assert saver.flush(60.0)
    assert len(store.blocks) == saver.counts().saved == capacity + 1
    saver.close()


def test_what_the_store_refuses_is_told(blocks: DeviceBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaultStore()
    store.refuses = True
    saver = saver_of(store, blocks, capacity=4, workers=1)
    saver.submit(saves(1))
    assert saver.flush(60.0)

    def fail(key: bytes, block: memoryview) -> bool:
        raise OSError("gone")

    monkeypatch.setattr(store, "save", fail)
    saver.submit(saves(2))
    assert saver.flush(60.0)
    assert saver.take_unsaved() == [save.key for save in saves(1, 2)]
    assert (saver.counts().saved, saver.counts().refused) == (0, 2)
    saver.close()


@pytest.mark.parametrize("workers", [1, 3])
def test_closing_stores_what_is_left_and_ends_the_threads(blocks: DeviceBlocks, workers: int) -> None:
    before = threading.active_count()
    store = FaultStore()
    saver = saver_of(store, blocks, capacity=8, workers=workers)
    assert threading.active_count() == before + workers
    saver.submit(saves(*range(8)))
    saver.close()
    assert len(store.blocks) == 8
    assert threading.active_count() == before


def test_closing_does_not_wait_for_a_store_that_hangs(blocks: DeviceBlocks) -> None:
    store = FaultStore()
    store.goes_on.clear()
    saver = saver_of(store, blocks, capacity=8, workers=1)
    saver.submit(saves(1, 2))
    start = time.monotonic()
    saver.close(timeout=0.1)
    assert time.monotonic() - start < 10
    store.goes_on.set()


@pytest.mark.parametrize("error", [MemoryError("none"), RuntimeError("CUDA error: out of memory")])
def test_without_host_memory_blocks_are_dropped(
    blocks: DeviceBlocks, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """covers: F7. The step goes on, and there is room again once there is memory."""
    store, allocate, given = FaultStore(), blocks.allocate, [1]

    def scarce(nbytes: int) -> memoryview:
        if not given:
            raise error
        given.pop()
        return allocate(nbytes)

    monkeypatch.setattr(blocks, "allocate", scarce)
    saver = saver_of(store, blocks, capacity=3, workers=1)
    saver.submit(saves(1, 2, 3))
    assert saver.take_unsaved() == [save.key for save in saves(2, 3)]
    assert saver.flush(60.0)
    given += [1, 1]
    saver.submit(saves(4, 5, 6))
    assert saver.flush(60.0)
    assert set(stored(store)) == {1, 4, 5, 6}
    saver.check_integrity()
    saver.close()


def test_a_copy_that_raises_takes_no_room(blocks: DeviceBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: F7"""

    def fail(*given: object) -> None:
        raise RuntimeError("the device is gone")

    saver = saver_of(FaultStore(), blocks, capacity=2, workers=1)
    with monkeypatch.context() as patched:
        patched.setattr(blocks, "read", fail)
        with pytest.raises(RuntimeError, match="device is gone"):
            saver.submit(saves(1, 2))
    with pytest.raises(RuntimeError, match="device is gone"):
        saver.submit_record(b"key", fail)
    assert saver.flush(60.0), "nothing is on its way"
    saver.submit(saves(3, 4))
    assert saver.take_unsaved() == []
    assert saver.flush(60.0)
    saver.close()


def test_uses_follow_the_saves(blocks: DeviceBlocks) -> None:
    """And an error of the store costs nothing."""
    store = FaultStore()
    store.goes_on.clear()
    saver = saver_of(store, blocks, capacity=4, workers=1)
    saver.submit(saves(1, 5))
    saver.submit_use([b"used" * 8])
    assert store.used == []
    store.goes_on.set()
    assert saver.flush(60.0)
    assert store.used == [(b"used" * 8, 2)]
    store.raises = True
    saver.submit_use([b"used" * 8])
    assert saver.flush(60.0)
    saver.close()
    saver.check_integrity()
