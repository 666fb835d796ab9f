"""Stores that lend their blocks: delivered from where they lie, and copied only for those who want to find them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.prefetch.conftest import MakeEngine
from tests.prefetch.stores import ScriptedStore, content, eventually, key, keys
from tests.prefetch.test_deliver import Receiver
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.outcome import PrefetchOutcome


class LendingStore(ScriptedStore):
    """`lent`: loans that are open now."""

    lent = 0

    def lend(self, key: bytes) -> AbstractContextManager[memoryview] | None:
        return self._loan(key) if key in self.blocks else None

    @contextmanager
    def _loan(self, of: bytes) -> Iterator[memoryview]:
        self.lent += 1
        try:
            yield memoryview(content(of))
        finally:
            self.lent -= 1


def test_a_lent_block_is_delivered_without_a_copy(make_engine: MakeEngine) -> None:
    store = LendingStore(range(4))
    engine = make_engine(store, prefetch_workers=1)
    receiver = Receiver()
    handle = engine.submit_prefetch("r", keys(0, 1, 2, 3), deliver=receiver)
    assert handle.wait(5) is PrefetchOutcome.READY
    assert receiver.blocks == {number: content(key(number)) for number in range(4)}
    assert not store.order, "nothing was loaded by copy"
    assert eventually(lambda: store.lent == 0)
    stats = engine.stats()
    assert (stats.blocks_loaded, stats.cache_blocks) == (4, 0)


def test_a_prefetch_keeps_a_copy_of_what_is_lent(make_engine: MakeEngine) -> None:
    store = LendingStore(range(2))
    engine = make_engine(store)
    assert engine.submit_prefetch("r", keys(0, 1)).wait(5) is PrefetchOutcome.READY
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
    assert receiver.entered.wait(5)
    kept = engine.submit_prefetch("b", keys(0))
    assert eventually(lambda: engine.stats().blocks_shared == 1)
    receiver.gate.set()
    assert delivered.wait(5) is PrefetchOutcome.READY
    assert kept.wait(5) is PrefetchOutcome.READY
    assert engine.stats().blocks_loaded == 1
    found = engine.get_prefetched_kv("b")
    assert found is not None
    assert bytes(found[0]) == content(key(0))
    engine.forget("b")


def test_a_missing_block_is_a_miss(make_engine: MakeEngine) -> None:
    engine = make_engine(LendingStore(range(1)))
    handle = engine.submit_prefetch("r", keys(0, 7), deliver=Receiver())
    assert handle.wait(5) is PrefetchOutcome.FAILED
    assert handle.failed == {1}


def test_without_host_memory_a_prefetch_fails_and_nothing_hangs(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(nbytes: int) -> memoryview:
        raise MemoryError(f"no {nbytes} bytes")

    engine: PrefetchEngine = make_engine(LendingStore(range(3)))
    monkeypatch.setattr(engine._threads._runner, "_allocate", no_memory)
    receiver = Receiver()
    assert engine.submit_prefetch("a", keys(0, 1)).wait(5) is PrefetchOutcome.FAILED
    assert engine.submit_prefetch("b", keys(2), deliver=receiver).wait(5) is PrefetchOutcome.READY
    assert receiver.blocks == {0: content(key(2))}
