"""The prefetch engine over real stores that fail in the middle: what arrives is right, and nobody hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store.blocks import BLOCK_BYTES, block, key
from tests.store.redis_server import RedisServer, needs_redis
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome

COUNT = 600  # more than one call takes
MakeEngine = Callable[..., PrefetchEngine]


@pytest.fixture
def over() -> Iterator[MakeEngine]:
    engines: list[PrefetchEngine] = []

    def make(store: Any, **options: Any) -> PrefetchEngine:
        engines.append(PrefetchEngine(store, BLOCK_BYTES, PrefetchOptions(**options)))
        engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        assert engine.stop(10)
        engine.check_integrity()


def keys(count: int = COUNT) -> list[bytes]:
    return [key(number) for number in range(count)]


@pytest.fixture
def full(store: Any) -> Any:
    for number in range(COUNT):
        assert store.save(key(number), block(number))
    return store


def test_blocks_of_every_store_are_delivered(full: Any, over: MakeEngine) -> None:
    engine, found = over(full), {}

    def deliver(index: int, data: memoryview) -> None:
        found[index] = bytes(data)

    assert engine.submit_prefetch("r", keys(), deliver=deliver).wait(60) is PrefetchOutcome.READY
    assert all(found[number] == block(number) for number in range(COUNT))
    assert full.stats().hits == COUNT
    assert engine.stats().cache_blocks == 0


def test_blocks_of_every_store_are_kept_in_host_memory(full: Any, over: MakeEngine) -> None:
    engine = over(full)
    assert engine.submit_prefetch("r", keys(50)).wait(60) is PrefetchOutcome.READY
    full.clear()
    found = engine.get_prefetched_kv("r")
    assert found is not None
    assert [bytes(data) for data in found] == [block(number) for number in range(50)]
    engine.forget("r")


def test_a_corrupt_block_of_a_server_fails_alone(redis_server: RedisServer, open_one: Any, over: MakeEngine) -> None:
    """covers: D3"""
    store = open_one({"kind": "redis", "url": redis_server.url, "deadline": 5.0})
    for number in range(20):
        store.save(key(number), block(number))
    client = redis_server.client()
    (name,) = [name for name in client.scan_iter() if name.endswith(key(7))]
    client.setrange(name, 500, b"\x00" * 8)
    handle = over(store).submit_prefetch("r", keys(20), deliver=lambda index, data: None)
    assert handle.wait(60) is PrefetchOutcome.FAILED
    assert handle.failed == {7}


@pytest.mark.parametrize("harm", ["kill", "freeze"])
def test_a_server_that_goes_in_the_middle(tmp_path: Path, open_one: Any, over: MakeEngine, harm: str) -> None:
    """covers: D4. What came before is right, the breaker opens, and all of it ends long before the deadline."""
    needs_redis()
    server = RedisServer(tmp_path)
    store = open_one({"kind": "redis", "url": server.url, "deadline": 0.3, "breaker": {"failures": 2, "seconds": 60.0}})
    for number in range(COUNT):
        assert store.save(key(number), block(number))
    first, found = threading.Lock(), {}

    def deliver(index: int, data: memoryview) -> None:
        with first:
            if not found:
                getattr(server, harm)()
            found[index] = bytes(data)

    try:
        begin = time.monotonic()
        # One thread: several would have asked for everything, and had it sent, before the first block is delivered.
        engine = over(store, prefetch_workers=1)
        handle = engine.submit_prefetch("r", keys(), deliver=deliver, deadline=30.0)
        assert handle.wait() is PrefetchOutcome.FAILED
        assert time.monotonic() - begin < 10
        assert 0 < len(found) < COUNT
        assert handle.failed == set(range(COUNT)) - set(found)
        assert all(data == block(number) for number, data in found.items())
        assert store.stats().breaker == "open"
    finally:
        if harm == "freeze":
            server.thaw()
        server.kill()
