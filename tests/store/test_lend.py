"""Blocks that stores lend, several in one call: verified, left alone until given back, in buffers used again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from tests.store.blocks import BLOCK_BYTES, block, key, loaded
from tests.store.faulty_medium import FaultyMedium
from tests.store.redis_server import RedisServer, needs_redis
from vllm_gaudi_ucm.store.base import HEADER_BYTES
from vllm_gaudi_ucm.store.guarded import GuardedStore
from vllm_gaudi_ucm.store.medium import REFUSED
from vllm_gaudi_ucm.store.records import RecordPool
from vllm_gaudi_ucm.store.redis import RedisStoreOptions

DEADLINE = 0.3


@pytest.fixture
def medium() -> FaultyMedium:
    return FaultyMedium()


@pytest.fixture
def guarded(medium: FaultyMedium) -> Iterator[GuardedStore]:
    options = RedisStoreOptions.model_validate(
        {"deadline": DEADLINE, "io_threads": 2, "breaker": {"failures": 3, "seconds": 60.0}}
    )
    store = GuardedStore(medium, BLOCK_BYTES, options)
    yield store
    medium.gate.set()
    store.close()


def borrowed(store: Any, numbers: Sequence[int]) -> list[bytes | None]:
    """What the store lends for these keys, None for a miss."""
    with ExitStack() as stack:
        loans = store.lend([key(number) for number in numbers])
        return [None if loan is None else bytes(stack.enter_context(loan)) for loan in loans]


def test_several_blocks_in_one_call(store: Any) -> None:
    """Of every kind of store."""
    for number in range(4):
        store.save(key(number), block(number))
    assert borrowed(store, [3, 9, 0, 1]) == [block(3), None, block(0), block(1)]
    assert borrowed(store, [8]) == [None]
    assert store.lend([]) == []
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.bytes_loaded) == (3, 2, 3 * BLOCK_BYTES)
    assert stats.load_seconds > 0
    assert store.batch_bytes > 0


def test_what_is_lent_is_read_only_and_stays(store: Any) -> None:
    """covers: C9. Other loads, a save and a deletion meanwhile."""
    for number in range(3):
        store.save(key(number), block(number))
    first, second = store.lend([key(0), key(1)])
    with first as one, second as two:
        assert one.readonly
        assert one.nbytes == BLOCK_BYTES
        for _ in range(3):
            assert loaded(store, 2) == block(2)
        store.delete([key(0)])
        store.save(key(0), block(5))
        assert (one, two) == (block(0), block(1))


def test_a_lent_block_is_checked(guarded: GuardedStore, medium: FaultyMedium) -> None:
    """covers: D3. The damaged one of a call is a miss; the others come."""
    for number in range(3):
        guarded.save(key(number), block(number))
    name = list(medium.records)[1]
    record = bytearray(medium.records[name])
    record[HEADER_BYTES + 7] ^= 1
    medium.records[name] = bytes(record)
    assert borrowed(guarded, [0, 1, 2]) == [block(0), None, block(2)]
    stats = guarded.stats()
    assert (stats.corrupt, stats.hits, stats.misses, stats.blocks) == (1, 2, 1, 2)


def test_one_record_that_is_refused_spoils_no_other(guarded: GuardedStore, medium: FaultyMedium) -> None:
    for number in range(2):
        guarded.save(key(number), block(number))
    read = medium.read
    medium.read = lambda of, size, record: REFUSED if of == key(0) else read(of, size, record)  # type: ignore[method-assign]
    assert borrowed(guarded, [0, 1]) == [None, block(1)]
    stats = guarded.stats()
    assert (stats.errors, stats.corrupt, stats.breaker) == (1, 0, "closed")


def test_a_call_that_hangs_costs_one_deadline_whatever_it_asked_for(
    guarded: GuardedStore, medium: FaultyMedium
) -> None:
    """covers: D4"""
    medium.gate.clear()
    begin = time.monotonic()
    assert borrowed(guarded, range(16)) == [None] * 16
    assert DEADLINE * 0.9 < time.monotonic() - begin < DEADLINE + 10
    stats = guarded.stats()
    assert (stats.timeouts, stats.misses) == (1, 16)


def test_a_late_read_writes_into_nobodys_buffer(guarded: GuardedStore, medium: FaultyMedium) -> None:
    """covers: D7. What the thread that still reads has taken is lent to nobody before it ends."""
    for number in range(3):
        guarded.save(key(number), block(number))
    entered, go_on = threading.Event(), threading.Event()
    read = medium.read

    def slow_read(of: bytes, size: int, record: memoryview) -> int | None:
        if of == key(0):
            entered.set()
            assert go_on.wait(60)
        return read(of, size, record)

    medium.read = slow_read  # type: ignore[method-assign]
    assert borrowed(guarded, [0, 1]) == [None, None]
    assert entered.is_set()
    first, second = guarded.lend([key(1), key(2)])
    assert first is not None
    assert second is not None
    with first as one, second as two:
        go_on.set()
        time.sleep(0.1)
        assert (one, two) == (block(1), block(2))


def test_buffers_are_used_again(guarded: GuardedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of misses, of calls that fail, and of calls that the breaker does not let through."""
    made: list[int] = []
    new = RecordPool._new

    def counting(pool: RecordPool) -> memoryview:
        made.append(1)
        return new(pool)

    monkeypatch.setattr(RecordPool, "_new", counting)
    guarded.save(key(0), block(0))
    medium = guarded._medium
    assert isinstance(medium, FaultyMedium)
    for _ in range(5):
        assert borrowed(guarded, [0, 1, 2]) == [block(0), None, None]
    medium.error = OSError("broken")
    for _ in range(10):
        assert borrowed(guarded, [0, 1]) == [None, None]
    assert guarded.stats().breaker == "open"
    assert len(made) == 3


def test_no_memory_for_buffers_is_a_miss(guarded: GuardedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: F7. Page-locked memory may be out; the buffers that were to be had are used again."""
    for number in range(3):
        guarded.save(key(number), block(number))
    new, made = RecordPool._new, []

    def scarce(pool: RecordPool) -> memoryview:
        if len(made) == 2:
            raise RuntimeError("CUDA error: out of memory")
        made.append(1)
        return new(pool)

    monkeypatch.setattr(RecordPool, "_new", scarce)
    assert borrowed(guarded, [0, 1, 2]) == [None] * 3
    assert borrowed(guarded, [0, 1]) == [block(0), block(1)]
    stats = guarded.stats()
    assert (stats.errors, stats.hits, stats.misses, stats.breaker) == (1, 2, 3, "closed")


def test_page_locked_buffers_where_a_device_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked once, and in the thread that borrows: its device is the one they are for."""
    torch = pytest.importorskip("torch")
    empty, traits, asked = torch.empty, [], []

    def fake(*size: Any, pin_memory: bool = False, **rest: Any) -> Any:
        traits.append(pin_memory)
        return empty(*size, **rest)

    def can_pin() -> bool:
        asked.append(threading.current_thread())
        return True

    monkeypatch.setattr(torch, "empty", fake)
    pool = RecordPool(BLOCK_BYTES, can_pin)
    assert {pool.take_record().nbytes, pool.take_record().nbytes} == {HEADER_BYTES + BLOCK_BYTES}
    assert traits == [True, True]
    assert asked == [threading.current_thread()]


def test_closed_stores_lend_nothing(store: Any) -> None:
    store.close()
    with pytest.raises(RuntimeError, match="store is closed"):
        store.lend([key(0)])


def test_a_server_is_asked_once_for_several_blocks(redis_server: RedisServer, open_one: Callable[..., Any]) -> None:
    """In one round trip: with a server that takes a while for each command the others wait behind the first."""
    options = {"kind": "redis", "url": redis_server.url, "deadline": 5.0}
    store = open_one(options)
    for number in range(8):
        store.save(key(number), block(number))
    client = redis_server.client()
    before = client.info("commandstats")["cmdstat_get"]["calls"] if "cmdstat_get" in client.info("commandstats") else 0
    reads = client.info("stats").get("total_reads_processed", 0)
    assert borrowed(store, range(8)) == [block(number) for number in range(8)]
    after = client.info()
    assert client.info("commandstats")["cmdstat_get"]["calls"] - before == 8
    # the reads of this client's own questions among them
    assert after["total_reads_processed"] - reads <= 4


def test_a_server_that_dies_between_calls_is_a_miss(tmp_path: Any, open_one: Callable[..., Any]) -> None:
    """covers: D4"""
    needs_redis()
    server = RedisServer(tmp_path)
    try:
        store = open_one({"kind": "redis", "url": server.url, "deadline": 2.0})
        for number in range(4):
            store.save(key(number), block(number))
        assert borrowed(store, range(4)) == [block(number) for number in range(4)]
        server.freeze()
        begin = time.monotonic()
        assert borrowed(store, range(4)) == [None] * 4
        assert time.monotonic() - begin < 10
        server.thaw()
        server.kill()
        assert borrowed(store, range(4)) == [None] * 4
    finally:
        server.kill()


def test_time_to_live_of_blocks_that_are_lent_together(redis_server: RedisServer, open_one: Callable[..., Any]) -> None:
    """Option ttl counts from the last use, of each of them."""
    store = open_one({"kind": "redis", "url": redis_server.url, "deadline": 5.0, "ttl": 100.0})
    client = redis_server.client()
    for number in range(2):
        store.save(key(number), block(number))
    names = client.keys()
    for name in names:
        client.pexpire(name, 5000)
    assert borrowed(store, [0, 1]) == [block(0), block(1)]
    assert all(client.pttl(name) > 90_000 for name in names)


def test_a_value_of_another_type_spoils_no_other(redis_server: RedisServer, open_one: Callable[..., Any]) -> None:
    """covers: D3"""
    store = open_one({"kind": "redis", "url": redis_server.url, "deadline": 5.0})
    client = redis_server.client()
    store.save(key(0), block(0))
    (name,) = client.keys()
    client.delete(name)
    client.hset(name, "a", "b")
    store.save(key(1), block(1))
    assert borrowed(store, [0, 1]) == [None, block(1)]
    assert (store.stats().errors, store.stats().breaker) == (1, "closed")
