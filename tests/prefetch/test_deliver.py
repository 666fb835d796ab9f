"""Blocks that are handed on to the device: by threads of the engine, and never after a drain."""

from __future__ import annotations

from tests.prefetch.conftest import MakeEngine
from tests.prefetch.deliver import Receiver
from tests.prefetch.stores import ScriptedStore, content, eventually, key, keys
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority


def test_every_block_is_delivered_once_by_the_engines_threads(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedStore(range(40)))
    receiver = Receiver()
    handle = engine.submit_prefetch("r", keys(*range(40)), PrefetchPriority.URGENT, receiver)
    assert handle.wait(60) is PrefetchOutcome.READY
    assert receiver.blocks == {number: content(key(number)) for number in range(40)}
    assert all(name.startswith("ucm-prefetch-") for name in receiver.threads)


def test_a_block_that_cannot_be_delivered_fails_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedStore(range(4)))
    receiver = Receiver(broken=(2,))
    handle = engine.submit_prefetch("r", keys(0, 1, 2, 3), deliver=receiver)
    assert handle.wait(60) is PrefetchOutcome.FAILED
    assert handle.failed == {2}
    assert set(receiver.blocks) == {0, 1, 3}
    assert engine.stats().deliver_errors == 1


def test_what_was_prefetched_is_delivered_without_the_store(make_engine: MakeEngine) -> None:
    store = ScriptedStore(range(8))
    engine = make_engine(store)
    engine.submit_prefetch("r", keys(0, 1, 2)).wait(60)
    store.blocks.clear()
    receiver = Receiver()
    assert engine.submit_prefetch("r", keys(0, 1, 2), deliver=receiver).wait(60) is PrefetchOutcome.READY
    assert receiver.blocks == {number: content(key(number)) for number in range(3)}
    assert engine.stats().blocks_cached == 3
    assert set(store.loads().values()) == {1}


def test_a_load_without_deliver_that_runs_is_joined_by_one_with(make_engine: MakeEngine) -> None:
    store = ScriptedStore(range(8), is_open=False)
    engine = make_engine(store)
    engine.submit_prefetch("waiting", keys(0, 1))
    assert eventually(lambda: len(store.order) == 2)
    receivers = [Receiver(), Receiver()]
    handles = [engine.submit_prefetch(f"r{n}", keys(0, 1), deliver=r) for n, r in enumerate(receivers)]
    store.gate.set()
    assert [handle.wait(60) for handle in handles] == [PrefetchOutcome.READY] * 2
    assert all(receiver.blocks == {n: content(key(n)) for n in (0, 1)} for receiver in receivers)
    assert len(store.order) == 2


def test_nothing_is_delivered_after_a_drain(make_engine: MakeEngine) -> None:
    """covers: C9"""
    store = ScriptedStore(range(8), is_open=False)
    engine = make_engine(store, prefetch_workers=2)
    receiver = Receiver()
    handle = engine.submit_prefetch("r", keys(*range(8)), deliver=receiver)
    assert eventually(lambda: len(store.order) == 2)
    assert engine.drain("r", 5), "no deliver runs while the store is read"
    store.gate.set()
    assert engine.submit_prefetch("other", keys(7)).wait(60) is PrefetchOutcome.READY
    assert receiver.blocks == {}
    assert handle.outcome is PrefetchOutcome.CANCELLED


def test_a_drain_waits_for_the_deliver_that_runs(make_engine: MakeEngine) -> None:
    """covers: C9"""
    engine = make_engine(ScriptedStore(range(8)), prefetch_workers=1)
    receiver = Receiver(is_open=False)
    handle = engine.submit_prefetch("r", keys(0, 1), deliver=receiver)
    assert receiver.entered.wait(60)
    assert not engine.drain("r", 0.02)
    assert handle.outcome is None, "an outcome would say that its device blocks are nobody's"
    engine.submit_prefetch("r", keys(3))
    assert not engine.drain("r", 0.02), "the one before, of the same id, still writes"
    receiver.gate.set()
    assert engine.drain("r", 5)
    assert handle.outcome is PrefetchOutcome.CANCELLED
    assert set(receiver.blocks) == {0}


def test_a_full_cache_does_not_stop_deliveries(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedStore(range(20)), prefetch_cache_size=1)
    engine.submit_prefetch("holds", keys(0)).wait(60)
    assert engine.get_prefetched_kv("holds")
    receiver = Receiver()
    assert engine.submit_prefetch("r", keys(*range(1, 9)), deliver=receiver).wait(60) is PrefetchOutcome.READY
    assert receiver.blocks == {n: content(key(n + 1)) for n in range(8)}
    staged = engine.submit_prefetch("staged", keys(9))
    assert staged.wait(60) is PrefetchOutcome.FAILED
    assert engine.stats().no_room == 1


def test_a_deliver_may_call_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedStore(range(4)))
    seen = []

    def deliver(index: int, block: memoryview) -> None:
        seen.append(engine.outcome("r"))
        engine.submit_prefetch("other", keys(3))

    assert engine.submit_prefetch("r", keys(0), deliver=deliver).wait(60) is PrefetchOutcome.READY
    assert seen == [None]
