"""What the callers of the prefetch engine see: blocks, outcomes, and no surprises between them."""

from __future__ import annotations

import threading
import time

import pytest

from tests.prefetch.conftest import MakeEngine
from tests.prefetch.stores import BLOCK_BYTES, ScriptedStore, content, eventually, key, keys
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority

READY, FAILED, TIMEOUT, CANCELLED, UNKNOWN = PrefetchOutcome


def test_the_seeds_example(make_engine: MakeEngine) -> None:
    """Seed 000, 3.2: submit, wait, get; the handle speaks of the same prefetch."""
    engine = make_engine(ScriptedStore([1, 2, 3]))
    priority = PrefetchPriority.compute_priority(queue_position=0)
    handle = engine.submit_prefetch("request", keys(1, 2, 3), priority)
    assert engine.wait_for_completion("request", timeout=60) is READY
    blocks = engine.get_prefetched_kv("request")
    assert blocks is not None
    assert [bytes(block) for block in blocks] == [content(key(number)) for number in (1, 2, 3)]
    assert (handle.outcome, handle.failed, handle.wait()) == (READY, frozenset(), READY)


def test_a_block_that_is_not_there_fails_its_request_and_names_itself(make_engine: MakeEngine) -> None:
    """covers: C6, C8"""
    engine = make_engine(ScriptedStore([1, 3]))
    handle = engine.submit_prefetch("half", keys(1, 2, 3))
    assert engine.wait_for_completion("half", 5) is FAILED
    assert handle.failed == {1}
    assert engine.get_prefetched_kv("half") is None
    assert engine.stats().misses == 1
    assert engine.stats().outcomes[FAILED] == 1


def test_a_store_that_raises_fails_the_block_and_no_thread(make_engine: MakeEngine) -> None:
    store = ScriptedStore([1, 2])
    store.errors[key(1)] = OSError("disk")
    engine = make_engine(store)
    handle = engine.submit_prefetch("r", keys(1, 2))
    assert handle.wait(60) is FAILED
    assert handle.failed == {0}
    assert engine.stats().errors == 1
    assert engine.submit_prefetch("again", keys(1, 2)).wait(60) is READY
    assert engine.stats().threads_replaced == 0


def test_unknown_requests_are_unknown(make_engine: MakeEngine) -> None:
    """covers: C6"""
    engine = make_engine(ScriptedStore())
    assert engine.outcome("never") is UNKNOWN
    assert engine.wait_for_completion("never", 5) is UNKNOWN
    assert engine.get_prefetched_kv("never") is None
    assert not engine.cancel("never")
    assert not engine.reprioritise("never", PrefetchPriority.URGENT)
    assert engine.drain("never", 0)
    engine.forget("never")


def test_a_wait_ends_and_the_prefetch_goes_on(make_engine: MakeEngine) -> None:
    store = ScriptedStore([1], is_open=False)
    engine = make_engine(store)
    engine.submit_prefetch("r", keys(1))
    start = time.monotonic()
    assert engine.wait_for_completion("r", 0.05) is TIMEOUT
    assert time.monotonic() - start < 20, "the store hangs for 60 s"
    assert engine.outcome("r") is None
    store.gate.set()
    assert engine.wait_for_completion("r", 60) is READY
    assert (engine.stats().waits, engine.stats().wait_timeouts) == (2, 1)
    assert engine.stats().wait_seconds > 0.04


def test_waiting_for_whichever_is_first(make_engine: MakeEngine) -> None:
    store = ScriptedStore([1, 2], is_open=False)
    engine = make_engine(store)
    handles = [engine.submit_prefetch(str(number), keys(number)) for number in (1, 2)]
    assert not engine.wait_for_any([], 5), "nothing to wait for"
    assert not engine.wait_for_any(handles, 0.01)
    start = time.monotonic()
    threading.Timer(0.02, lambda: engine.cancel("2")).start()
    assert engine.wait_for_any(handles, 60)
    assert time.monotonic() - start < 20
    assert [handle.outcome for handle in handles] == [None, CANCELLED]
    assert engine.wait_for_any(handles, 0)


def test_one_load_serves_everyone_who_wants_the_block(make_engine: MakeEngine) -> None:
    store = ScriptedStore(range(10), is_open=False)
    engine = make_engine(store)
    handles = [engine.submit_prefetch(f"r{number}", keys(1, 2, 3, number + 4)) for number in range(4)]
    store.gate.set()
    assert [handle.wait(60) for handle in handles] == [READY] * 4
    assert set(store.loads().values()) == {1}
    stats = engine.stats()
    assert stats.blocks_loaded == 7
    assert stats.blocks_loaded + stats.blocks_cached + stats.blocks_shared == 16
    assert stats.bytes_loaded == 7 * BLOCK_BYTES


def test_a_failed_block_fails_only_those_who_need_it(make_engine: MakeEngine) -> None:
    store = ScriptedStore([1, 2], is_open=False)
    engine = make_engine(store)
    needs_it = [engine.submit_prefetch(name, keys(1, 9)) for name in ("a", "b")]
    does_not = engine.submit_prefetch("c", keys(1, 2))
    store.gate.set()
    assert [handle.wait(60) for handle in needs_it] == [FAILED, FAILED]
    assert [handle.failed for handle in needs_it] == [{1}, {1}]
    assert does_not.wait(60) is READY


def test_a_key_may_come_twice(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedStore([1]))
    assert engine.submit_prefetch("r", keys(1, 1)).wait(60) is READY
    blocks = engine.get_prefetched_kv("r")
    assert blocks is not None
    assert [bytes(block) for block in blocks] == [content(key(1))] * 2


def test_no_blocks_are_ready_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedStore())
    assert engine.submit_prefetch("r", []).outcome is READY
    assert engine.get_prefetched_kv("r") == []


def test_an_id_that_is_used_again_stands_for_the_new_prefetch(make_engine: MakeEngine) -> None:
    """covers: C5"""
    store = ScriptedStore([1, 2], is_open=False)
    engine = make_engine(store)
    old = engine.submit_prefetch("id", keys(1))
    new = engine.submit_prefetch("id", keys(2))
    assert old.outcome is CANCELLED
    store.gate.set()
    assert new.wait(60) is READY
    blocks = engine.get_prefetched_kv("id")
    assert blocks is not None
    assert bytes(blocks[0]) == content(key(2))
    assert (old.outcome, old.failed) == (CANCELLED, {0})


def test_forgotten_requests_leave_nothing(make_engine: MakeEngine) -> None:
    """covers: C5"""
    store = ScriptedStore([1, 2])
    engine = make_engine(store)
    engine.submit_prefetch("done", keys(1)).wait(60)
    assert engine.get_prefetched_kv("done")
    engine.forget("done")
    store.gate.clear()
    pending = engine.submit_prefetch("pending", keys(2))
    engine.forget("pending")
    assert [engine.outcome(name) for name in ("done", "pending")] == [UNKNOWN, UNKNOWN]
    assert pending.outcome is CANCELLED
    assert engine.stats().pending == 0


def test_outcomes_are_kept_for_the_last_requests_only(make_engine: MakeEngine) -> None:
    """covers: C5"""
    engine = make_engine(ScriptedStore([1]))
    for number in range(1500):
        engine.submit_prefetch(str(number), [])
    assert engine.outcome("0") is UNKNOWN
    assert engine.outcome("1499") is READY
    assert engine.stats().outcomes[READY] == 1500


def test_memory_that_was_given_out_stays_until_it_is_forgotten(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedStore(range(50)), prefetch_cache_size=2)
    engine.submit_prefetch("mine", keys(1)).wait(60)
    blocks = engine.get_prefetched_kv("mine")
    assert blocks is not None
    for number in range(2, 20):
        engine.submit_prefetch(f"other {number}", keys(number)).wait(60)
    assert bytes(blocks[0]) == content(key(1))
    again = engine.get_prefetched_kv("mine")
    assert again is not None
    assert again[0].obj is blocks[0].obj
    engine.forget("mine")
    for number in range(20, 23):
        engine.submit_prefetch(f"other {number}", keys(number)).wait(60)
    assert bytes(blocks[0]) != content(key(1))


def test_blocks_that_were_evicted_are_not_there(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedStore(range(9)), prefetch_cache_size=2)
    for number in range(1, 4):
        assert engine.submit_prefetch(str(number), keys(number)).wait(60) is READY
    assert engine.get_prefetched_kv("1") is None
    assert engine.get_prefetched_kv("3") is not None
    assert engine.stats().evictions == 1


def test_a_cancelled_request_gives_up_what_has_not_arrived(make_engine: MakeEngine) -> None:
    store = ScriptedStore(range(9), is_open=False)
    engine = make_engine(store, prefetch_workers=1)
    handle = engine.submit_prefetch("r", keys(1, 2, 3))
    assert eventually(lambda: len(store.order) == 1)
    assert handle.cancel()
    assert not engine.cancel("r"), "it is cancelled already"
    assert (handle.outcome, handle.failed) == (CANCELLED, {0, 1, 2})
    store.gate.set()
    assert engine.submit_prefetch("next", keys(8)).wait(60) is READY
    assert store.order == keys(1, 8)


def test_wrong_block_size_is_refused() -> None:
    with pytest.raises(ValueError, match="block_bytes: found 0"):
        PrefetchEngine(ScriptedStore(), 0, PrefetchOptions())
