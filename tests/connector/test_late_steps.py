"""Blocks that a step in flight still writes: loads come after it. On the simulated card, which is late."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.hpu_process import run_on_card
from vllm_gaudi_ucm.connector.metadata import BlockLoad
from vllm_gaudi_ucm.connector.worker_side import BlockLoads
from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.kv_cache.device_blocks import DeviceBlocks
from vllm_gaudi_ucm.kv_cache.pair import KvPair
from vllm_gaudi_ucm.memory_mode.worker_side import OffloadWorker
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.protocol.offload import BlockMove, OffloadOrders
from vllm_gaudi_ucm.store.factory import open_store
from vllm_gaudi_ucm.store.memory import MemoryStoreOptions

pytestmark = pytest.mark.slow  # a child process on the simulated card

BLOCKS, TARGET = 4, 2
STEP, LOADED = 9.0, 5.0
KEY = bytes(32)


class Card:
    """A cache, and a step in flight that writes all of its keys."""

    def __init__(self) -> None:
        from habana_frameworks.torch.hpu import wrap_in_hpu_graph

        self.device = get_device("hpu")
        with torch.inference_mode():
            # blocks of two tokens
            self.cache, values = (torch.zeros((2 * BLOCKS, 1, 3), device=self.device.torch_device()) for _ in range(2))
            self._graph = wrap_in_hpu_graph(lambda cache: cache.fill_(STEP), disable_tensor_cache=True)
            self._graph(self.cache)
            self.cache.fill_(0)
        self.blocks = DeviceBlocks({"layer": KvPair(self.cache, values)}, 2, self.device)
        self.block = memoryview(torch.full((12,), LOADED).numpy()).cast("B")  # type: ignore[arg-type]

    @torch.inference_mode()
    def launch_step(self) -> None:
        self._graph(self.cache)

    def contents(self) -> list[float]:
        """The first number of each block, once everything has run."""
        self.device.synchronize()
        return [float(value) for value in self.cache[::2, 0, 0].cpu()]


def loads_of(card: Card) -> tuple[PrefetchEngine, BlockLoads]:
    size = card.blocks.block_bytes
    store = open_store(MemoryStoreOptions(capacity=4 * size, pin=False), size)
    store.save(KEY, card.block)
    options = PrefetchOptions(prefetch_workers=1)
    engine = PrefetchEngine(store, size, options, allocate=card.blocks.allocate, enter_thread=card.device.enter_thread)
    engine.start()
    return engine, BlockLoads(engine, card.blocks, deadline=10.0)


def load(loads: BlockLoads) -> None:
    end = time.monotonic() + 60
    while not loads.finished(set()) and time.monotonic() < end:
        loads.wait(0.1)
    assert loads.take_ordered() == {TARGET}


def connector() -> list[float]:
    """A request's load; the blocks were an aborted request's in the step before."""
    card = Card()
    engine, loads = loads_of(card)
    card.launch_step()
    loads.start(BlockLoad("request", [KEY], [TARGET]))
    load(loads)
    engine.stop()
    return card.contents()


def connector_waits_for_no_later_step() -> list[float]:
    """The steps after the order do not write the blocks: the load does not wait for the card to be idle."""
    from habana_frameworks.torch.hpu import Event

    card = Card()
    engine, loads = loads_of(card)
    loads.start(BlockLoad("request", [KEY], [TARGET]))
    card.launch_step()
    event = Event()
    event.record()
    load(loads)
    engine.stop()
    return [float(event.query())]


def memory_mode() -> list[float]:
    """A block that comes back to a place that another request has left."""
    card, pair = Card(), (7, 1)
    arrived: list[Any] = []
    copies: Any = SimpleNamespace(
        load=lambda pair: None,
        bring_near=lambda pairs: None,
        finished_saves=lambda: iter(()),
        finished_loads=lambda: iter(arrived),
    )
    summaries = SimpleNamespace(brought=lambda blocks: None)
    state: Any = SimpleNamespace(forget=lambda requests: None, summaries=summaries)
    scorer: Any = SimpleNamespace(restore_summary=lambda row, block: None)
    table: Any = None
    worker = OffloadWorker(table, state, scorer, card.blocks, copies)
    card.launch_step()
    worker.begin_step(OffloadOrders(stored=[(*pair, 0)], loads=[BlockMove(*pair, TARGET, 0)]))
    arrived.append((pair, card.block))
    worker.begin_step(OffloadOrders())
    assert worker.report().loaded == [pair]
    return card.contents()


def offloading() -> list[float]:
    """vLLM's OffloadingConnector: its copies run in the computation's own stream."""
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from vllm_gaudi_ucm.connector.offloading_connector import SwappingWorker

    card = Card()
    pages = SimpleNamespace(tensor=card.cache.view(BLOCKS, 6).view(torch.int8))
    caches: Any = SimpleNamespace(group_data_refs=[[SimpleNamespace(tensor_idx=0)]], tensors=[pages])
    worker = SwappingWorker(caches, blocks_per_chunk=1, num_chunks=2)
    with torch.inference_mode():
        card.cache.fill_(LOADED)
    there = GPULoadStoreSpec([TARGET], group_sizes=(1,), block_indices=(0,))
    assert worker.submit_store(1, there, CPULoadStoreSpec([1]))
    card.launch_step()
    # as vLLM 0.33 asks for a load that the step waits for
    assert worker.submit_load(2, CPULoadStoreSpec([1]), there, expedited=True)
    return card.contents()


def save() -> list[float]:
    """What is read is what the step in flight writes."""
    card = Card()
    card.launch_step()
    found = bytearray(card.blocks.block_bytes)
    card.blocks.read([(TARGET, memoryview(found))])
    return [float(torch.frombuffer(found, dtype=torch.float32)[0])]


KEPT = [LOADED if block == TARGET else STEP for block in range(BLOCKS)]
CASES: dict[Callable[[], list[float]], list[float]] = {
    connector: KEPT,
    connector_waits_for_no_later_step: [0.0],
    memory_mode: KEPT,
    offloading: KEPT,
    save: [STEP],
}


def run_all() -> dict[str, list[float]]:
    return {case.__name__: case() for case in CASES}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    answers: dict[str, list[float]] = run_on_card(run_all, tmp_path_factory.mktemp("card"), lazy=True).result
    return answers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_copies_and_steps_in_flight(case: Callable[[], list[float]], found: dict[str, list[float]]) -> None:
    """covers: F6"""
    assert found[case.__name__] == CASES[case]
