"""What the guard makes of a medium that fails, hangs, fills up, or gives back something else than it was given."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.store.blocks import BLOCK_BYTES, block, key, loaded
from tests.store.faulty_medium import FaultyMedium
from vllm_gaudi_ucm.store.base import HEADER_BYTES
from vllm_gaudi_ucm.store.guarded import GuardedStore
from vllm_gaudi_ucm.store.redis import RedisStoreOptions

DEADLINE = 0.3
FAILURES = 3
IO_THREADS = 2


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def medium() -> FaultyMedium:
    return FaultyMedium()


@pytest.fixture
def store(medium: FaultyMedium, clock: Clock) -> Iterator[GuardedStore]:
    breaker = {"failures": FAILURES, "seconds": 10.0}
    options = RedisStoreOptions.model_validate({"deadline": DEADLINE, "io_threads": IO_THREADS, "breaker": breaker})
    guarded = GuardedStore(medium, BLOCK_BYTES, options, clock)
    yield guarded
    medium.gate.set()
    guarded.close()


def test_a_hanging_medium_costs_the_deadline_and_no_more(store: GuardedStore, medium: FaultyMedium) -> None:
    """covers: D4"""
    store.save(key(1), block(1))
    medium.gate.clear()
    for call, answer in (
        (lambda: loaded(store, 1), None),
        (lambda: store.save(key(2), block(2)), False),
        (lambda: store.lookup([key(1)]), [False]),
    ):
        begin = time.monotonic()
        assert call() == answer
        assert DEADLINE * 0.9 < time.monotonic() - begin < DEADLINE + 10
    assert store.stats().timeouts == 3
    assert store.stats().breaker == "open"


def test_a_hanging_medium_takes_a_bounded_number_of_threads(store: GuardedStore, medium: FaultyMedium) -> None:
    """covers: D4. Option io_threads: stuck calls wait in that many threads, and callers queue up for none of them."""
    medium.gate.clear()
    before = threading.active_count()
    callers = [threading.Thread(target=store.lookup, args=([key(n)],)) for n in range(20)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert threading.active_count() - before <= IO_THREADS
    assert medium.calls <= IO_THREADS
    assert store.stats().misses == 20


def test_what_a_late_load_reads_does_not_reach_the_callers_buffer(store: GuardedStore, medium: FaultyMedium) -> None:
    """covers: D7. After a time-out the buffer may belong to another block."""
    store.save(key(1), block(1))
    medium.gate.clear()
    into = bytearray(BLOCK_BYTES)
    assert not store.load(key(1), memoryview(into))
    into[:] = b"\x55" * BLOCK_BYTES
    medium.gate.set()
    assert loaded(store, 1) == block(1)
    assert into == b"\x55" * BLOCK_BYTES


def test_a_late_save_writes_what_it_was_given(store: GuardedStore, medium: FaultyMedium) -> None:
    """covers: D3. The caller's buffer holds another block when the write goes on."""
    buffer = bytearray(block(1))
    entered = threading.Event()
    write = medium.write

    def slow_write(written: bytes, record: memoryview) -> bool:
        entered.set()
        time.sleep(3 * DEADLINE)
        return write(written, record)

    medium.write = slow_write  # type: ignore[method-assign]
    assert not store.save(key(1), memoryview(buffer))
    assert entered.is_set()
    buffer[:] = block(2)
    time.sleep(4 * DEADLINE)
    assert loaded(store, 1) == block(1)


def test_breaker_opens_tries_and_closes(store: GuardedStore, medium: FaultyMedium, clock: Clock) -> None:
    """covers: D4. Option breaker.failures and breaker.seconds."""
    store.save(key(1), block(1))
    medium.error = OSError("broken")
    for _ in range(FAILURES):
        assert store.stats().breaker == "closed"
        assert loaded(store, 1) is None
    assert store.stats().breaker == "open"
    asked = medium.calls
    assert loaded(store, 1) is None
    assert not store.save(key(2), block(2))
    assert medium.calls == asked
    clock.now += 10
    assert store.stats().breaker == "half_open"
    assert loaded(store, 1) is None
    assert store.stats().breaker == "open"
    assert medium.calls == asked + 1
    clock.now += 10
    medium.error = None
    assert loaded(store, 1) == block(1)
    stats = store.stats()
    assert (stats.breaker, stats.errors, stats.hits, stats.misses) == ("closed", FAILURES + 1, 1, FAILURES + 2)


@pytest.mark.parametrize("error", [OSError("disk"), ValueError("of ours"), KeyError("of ours"), MemoryError()])
def test_no_error_of_the_medium_reaches_the_caller(store: GuardedStore, medium: FaultyMedium, error: Exception) -> None:
    medium.error = error
    assert store.lookup([key(1)]) == [False]
    assert loaded(store, 1) is None
    assert store.stats().errors == 2


def test_clear_and_verify_of_a_broken_medium(store: GuardedStore, medium: FaultyMedium) -> None:
    store.save(key(1), block(1))
    medium.error = OSError("broken")
    assert store.verify() == (0, 0)
    assert store.clear() == 0
    assert store.delete([key(1)]) == 0
    assert store.stats().errors == 3


def test_a_full_medium_still_loads(store: GuardedStore, medium: FaultyMedium) -> None:
    store.save(key(1), block(1))
    medium.full = True
    for number in range(2, 4 + FAILURES):
        assert not store.save(key(number), block(number))
    stats = store.stats()
    assert (stats.breaker, stats.errors, stats.saves) == ("closed", 2 + FAILURES, 1)
    assert loaded(store, 1) == block(1)


def flipped(record: bytes, place: int) -> bytes:
    return record[:place] + bytes([record[place] ^ 1]) + record[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda r, place=place: flipped(r, place)
        for place in (0, 8, 12, 16, 24, 40, 60, HEADER_BYTES, 1000, -1 + HEADER_BYTES + BLOCK_BYTES)
    ]
    + [lambda r: r[:-1], lambda r: r + b"x", lambda r: b"", lambda r: r[:10], lambda r: bytes(len(r))],
)
def test_damage_anywhere_is_a_miss_and_is_removed(store: GuardedStore, medium: FaultyMedium, damage: Any) -> None:
    """covers: D3. Magic, version, checksum, length, key, padding, block, too short, too long, empty, zeros."""
    store.save(key(1), block(1))
    (name,) = medium.records
    medium.records[name] = damage(medium.records[name])
    assert loaded(store, 1) is None
    assert medium.records == {}
    stats = store.stats()
    assert (stats.corrupt, stats.misses, stats.hits, stats.breaker) == (1, 1, 0, "closed")
    assert store.save(key(1), block(1))
    assert loaded(store, 1) == block(1)


def test_the_record_of_another_key_is_corrupt(store: GuardedStore, medium: FaultyMedium) -> None:
    """covers: D3. A record under a wrong name holds a key, and that is compared."""
    store.save(key(1), block(1))
    store.save(key(2), block(2))
    one, two = medium.records
    medium.records[one] = medium.records[two]
    assert loaded(store, 1) is None
    assert loaded(store, 2) == block(2)


def test_verify_removes_what_is_corrupt(store: GuardedStore, medium: FaultyMedium) -> None:
    for number in range(4):
        store.save(key(number), block(number))
    name = next(iter(medium.records))
    medium.records[name] = flipped(medium.records[name], 100)
    assert store.verify() == (3, 1)
    assert store.verify() == (3, 0)
    assert store.stats().corrupt == 1


def test_close_while_the_medium_hangs(store: GuardedStore, medium: FaultyMedium) -> None:
    """covers: C2"""
    medium.gate.clear()
    store.lookup([key(1)])
    begin = time.monotonic()
    store.close()
    assert time.monotonic() - begin < DEADLINE + 10
    assert medium.closed
