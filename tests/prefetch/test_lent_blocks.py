"""Stores that lend their blocks: delivered from where they lie, and copied only for those who want to find them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import pytest

from tests.prefetch.conftest import MakeEngine
from tests.prefetch.deliver import Receiver
from tests.prefetch.lent_blocks import LendingStore
from tests.prefetch.stores import BLOCK_BYTES, content, eventually, key, keys
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority
from vllm_gaudi_ucm.store.base import Loan


def test_a_lent_block_is_delivered_without_a_copy(make_engine: MakeEngine) -> None:
    store = LendingStore(range(4))
    engine = make_engine(store, prefetch_workers=1)
    receiver = Receiver()
    handle = engine.submit_prefetch("r", keys(0, 1, 2, 3), deliver=receiver)
    assert handle.wait(60) is PrefetchOutcome.READY
    assert receiver.blocks == {number: content(key(number)) for number in range(4)}
    assert not store.order, "nothing was loaded by copy"
    assert eventually(lambda: store.lent == 0)
    stats = engine.stats()
    assert (stats.blocks_loaded, stats.cache_blocks) == (4, 0)


def test_a_prefetch_keeps_a_copy_of_what_is_lent(make_engine: MakeEngine) -> None:
    store = LendingStore(range(2))
    engine = make_engine(store)
    assert engine.submit_prefetch("r", keys(0, 1)).wait(60) is PrefetchOutcome.READY
    assert eventually(lambda: store.lent == 0)
    store.blocks.clear()
    found = engine.get_prefetched_kv("r")
    assert found is not None
    assert [bytes(block) for block in found] == [content(key(0)), content(key(1))]
    engine.forget("r")


def test_one_loan_serves_a_delivery_and_a_prefetch(make_engine: MakeEngine) -> None:
    """The prefetch joins while the block is being delivered."""
    store = LendingStore(range(1))
    engine = make_engine(store, prefetch_workers=2)
    receiver = Receiver(is_open=False)
    delivered = engine.submit_prefetch("a", keys(0), deliver=receiver)
    assert receiver.entered.wait(60)
    kept = engine.submit_prefetch("b", keys(0))
    assert eventually(lambda: engine.stats().blocks_shared == 1)
    receiver.gate.set()
    assert delivered.wait(60) is PrefetchOutcome.READY
    assert kept.wait(60) is PrefetchOutcome.READY
    assert engine.stats().blocks_loaded == 1
    found = engine.get_prefetched_kv("b")
    assert found is not None
    assert bytes(found[0]) == content(key(0))
    engine.forget("b")


def test_a_missing_block_is_a_miss(make_engine: MakeEngine) -> None:
    engine = make_engine(LendingStore(range(1)))
    handle = engine.submit_prefetch("r", keys(0, 7), deliver=Receiver())
    assert handle.wait(60) is PrefetchOutcome.FAILED
    assert handle.failed == {1}


def test_without_host_memory_a_prefetch_fails_and_nothing_hangs(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(nbytes: int) -> memoryview:
        raise MemoryError(f"no {nbytes} bytes")

    engine: PrefetchEngine = make_engine(LendingStore(range(3)))
    monkeypatch.setattr(engine._threads._runner._reader, "_allocate", no_memory)
    receiver = Receiver()
    assert engine.submit_prefetch("a", keys(0, 1)).wait(60) is PrefetchOutcome.FAILED
    assert engine.submit_prefetch("b", keys(2), deliver=receiver).wait(60) is PrefetchOutcome.READY
    assert receiver.blocks == {0: content(key(2))}


def test_delivering_a_lent_block_evicts_nothing(make_engine: MakeEngine) -> None:
    """What was prefetched for others stays in host memory."""
    store = LendingStore(range(8))
    engine = make_engine(store, prefetch_cache_size=2)
    assert engine.submit_prefetch("waiting", keys(0, 1)).wait(60) is PrefetchOutcome.READY
    assert engine.submit_prefetch("running", keys(2, 3, 4, 5), deliver=Receiver()).wait(60) is PrefetchOutcome.READY
    stats = engine.stats()
    assert (stats.evictions, stats.cache_blocks, stats.cache_bytes) == (0, 2, 2 * BLOCK_BYTES)
    store.blocks.clear()
    found = engine.get_prefetched_kv("waiting")
    assert found is not None
    assert [bytes(block) for block in found] == [content(key(0)), content(key(1))]
    engine.forget("waiting")


def test_a_prefetch_that_joins_needs_room(make_engine: MakeEngine) -> None:
    engine = make_engine(LendingStore(range(4)), prefetch_cache_size=1, prefetch_workers=2)
    assert engine.submit_prefetch("held", keys(0)).wait(60) is PrefetchOutcome.READY
    assert engine.get_prefetched_kv("held") is not None
    receiver = Receiver(is_open=False)
    delivered = engine.submit_prefetch("a", keys(1), deliver=receiver)
    assert receiver.entered.wait(60)
    joined = engine.submit_prefetch("b", keys(1))
    receiver.gate.set()
    assert delivered.wait(60) is PrefetchOutcome.READY
    assert joined.wait(60) is PrefetchOutcome.FAILED
    assert engine.stats().no_room == 1
    engine.forget("held")


def test_several_blocks_are_asked_for_in_one_call(make_engine: MakeEngine) -> None:
    """As many as `batch_bytes` says, of one request; one that is not there fails alone."""
    store = LendingStore([0, 1, 2, 4, 5, 6], batch=3)
    engine = make_engine(store, prefetch_workers=1)
    receiver = Receiver()
    handle = engine.submit_prefetch("r", keys(*range(7)), deliver=receiver)
    assert handle.wait(60) is PrefetchOutcome.FAILED
    assert handle.failed == {3}
    assert store.asked == [keys(0, 1, 2), keys(3, 4, 5), keys(6)]
    assert receiver.blocks == {number: content(key(number)) for number in (0, 1, 2, 4, 5, 6)}
    assert eventually(lambda: store.lent == 0)
    assert (engine.stats().blocks_loaded, engine.stats().misses) == (6, 1)


def test_an_urgent_request_overtakes_between_two_calls(make_engine: MakeEngine) -> None:
    store = LendingStore(range(20), batch=3)
    engine = make_engine(store, prefetch_workers=1)
    receiver = Receiver(is_open=False)
    large = engine.submit_prefetch("large", keys(*range(9)), PrefetchPriority.LOW, receiver)
    assert receiver.entered.wait(60)
    urgent = engine.submit_prefetch("urgent", keys(10, 11), PrefetchPriority.URGENT, Receiver())
    receiver.gate.set()
    assert large.wait(60) is PrefetchOutcome.READY
    assert urgent.wait(60) is PrefetchOutcome.READY
    assert store.asked == [keys(0, 1, 2), keys(10, 11), keys(3, 4, 5), keys(6, 7, 8)]


def test_cancelled_in_the_middle_of_a_call_the_rest_is_not_delivered(make_engine: MakeEngine) -> None:
    """covers: C9"""
    store = LendingStore(range(4), batch=4)
    engine = make_engine(store, prefetch_workers=1)
    receiver = Receiver(is_open=False)
    handle = engine.submit_prefetch("r", keys(0, 1, 2, 3), deliver=receiver)
    assert receiver.entered.wait(60)
    assert handle.cancel()
    assert not engine.drain("r", 0.05)
    receiver.gate.set()
    assert engine.drain("r", 5)
    assert handle.outcome is PrefetchOutcome.CANCELLED
    assert list(receiver.blocks) == [0]
    assert eventually(lambda: store.lent == 0)


def test_a_thread_that_ends_in_the_middle_of_a_call_gives_its_loans_back(make_engine: MakeEngine) -> None:
    """covers: C2. Its blocks fail, also for those who have joined."""
    store = LendingStore(range(4), batch=4)
    engine = make_engine(store, prefetch_workers=1)

    def deliver(index: int, block: memoryview) -> None:
        if index == 1:
            raise SystemExit

    handle = engine.submit_prefetch("r", keys(0, 1, 2, 3), deliver=deliver)
    assert handle.wait(60) is PrefetchOutcome.FAILED
    assert {1, 2, 3} <= handle.failed
    assert eventually(lambda: store.lent == 0)
    assert engine.submit_prefetch("next", keys(0, 1, 2, 3)).wait(60) is PrefetchOutcome.READY
    assert engine.stats().threads_replaced == 1


class BrokenLoans(LendingStore):
    """The second loan of each call cannot be entered."""

    def lend(self, keys: Sequence[bytes]) -> list[AbstractContextManager[memoryview] | None] | None:
        loans = super().lend(keys)
        assert loans is not None
        loans[1] = BrokenLoan(memoryview(b""), self._take_back)
        return loans


class BrokenLoan(Loan):
    def __enter__(self) -> memoryview:
        raise OSError("gone")


def test_a_loan_that_fails_ends_the_call(make_engine: MakeEngine) -> None:
    """What was lent before it is delivered; every loan is given back, entered or not, and the thread goes on."""
    store = BrokenLoans(range(4), batch=4)
    engine = make_engine(store, prefetch_workers=1)
    receiver = Receiver()
    handle = engine.submit_prefetch("r", keys(0, 1, 2, 3), deliver=receiver)
    assert handle.wait(60) is PrefetchOutcome.FAILED
    assert handle.failed == {1, 2, 3}
    assert receiver.blocks == {0: content(key(0))}
    assert eventually(lambda: store.lent == 0)
    stats = engine.stats()
    assert (stats.blocks_loaded, stats.errors, stats.misses, stats.threads_replaced) == (1, 3, 0, 0)
