"""What a worker says of its loads: which blocks they write when they are ordered, what did not come when they end."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from tests.connector.fault_store import FaultStore
from vllm_gaudi_ucm.connector.metadata import BlockLoad, RecordLoad
from vllm_gaudi_ucm.connector.worker_side import BlockLoads
from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.kv_cache.device_blocks import DeviceBlocks
from vllm_gaudi_ucm.kv_cache.pair import KvPair
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions

KEYS = [bytes([number]) * 32 for number in range(4)]


class Loads:
    """The loads of a worker whose store may do anything. Eight blocks of two tokens."""

    def __init__(self) -> None:
        rows = torch.zeros(16, 1, 3)
        self.blocks = DeviceBlocks({"layer": KvPair(rows, rows.clone())}, 2, get_device("cpu"))
        self.store = FaultStore()
        self.store.blocks = {key: bytes(self.blocks.block_bytes) for key in KEYS}
        self.engine = PrefetchEngine(self.store, self.blocks.block_bytes, PrefetchOptions(prefetch_cache_size=1))
        self.engine.start()
        self.loads = BlockLoads(self.engine, self.blocks, deadline=10.0)

    def end(self, ended: set[str] | None = None) -> set[str]:
        end = time.monotonic() + 60
        while not (found := self.loads.finished(ended or set())):
            assert time.monotonic() < end
            self.loads.wait(0.1)
        return found


@pytest.fixture
def worker() -> Iterator[Loads]:
    made = Loads()
    yield made
    made.store.heal()
    made.engine.stop()


@pytest.mark.parametrize("fate", ["comes", "is lost in part", "is not wanted any more"])
def test_blocks_are_named_when_their_load_is_ordered(worker: Loads, fate: str) -> None:
    """covers: C8 D9. Whatever becomes of it: of several workers each may see something else, at another time."""
    worker.store.goes_on.clear()
    worker.loads.start(BlockLoad("a", KEYS[:3], [5, 2, 7]))
    assert worker.loads.take_ordered() == {5, 2, 7}
    assert worker.loads.finished(set()) == set()
    if fate == "is lost in part":
        worker.store.lost = {KEYS[1]}
    worker.store.goes_on.set()
    assert worker.end({"a"} if fate == "is not wanted any more" else None) == {"a"}
    assert worker.loads.take_invalid() == ({2} if fate == "is lost in part" else set())
    assert worker.loads.take_ordered() == set()


def test_summaries_that_come_along_are_named_with_their_blocks(worker: Loads) -> None:
    """Of a load that leaves blocks in the store, even where it will fail: the request then begins anew."""
    worker.store.lost = {KEYS[3]}
    record = RecordLoad(KEYS[3], [-1, 9, -1], [5, 0, 7])
    worker.loads.start(BlockLoad("a", [KEYS[0], KEYS[2]], [5, 7], [record], is_partial=True))
    assert worker.loads.take_ordered() == {5, 7}
    assert worker.loads.take_summarised() == {5, 7}
    assert worker.end() == {"a"}
    assert worker.loads.take_failed() == {"a"}
    assert worker.loads.take_invalid() == worker.loads.take_ordered() == worker.loads.take_summarised() == set()
