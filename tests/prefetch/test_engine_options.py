"""Each option of the engine does what it says."""

from __future__ import annotations

import pytest

from tests.prefetch.conftest import MakeEngine
from tests.prefetch.stores import BLOCK_BYTES, ScriptedStore, eventually, key, keys
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority

READY, FAILED, TIMEOUT, CANCELLED, UNKNOWN = PrefetchOutcome
URGENT, HIGH, NORMAL, LOW = PrefetchPriority


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_prefetch_workers_is_how_many_blocks_are_read_at_once(make_engine: MakeEngine, workers: int) -> None:
    """covers: C4"""
    store = ScriptedStore(range(32), is_open=False)
    engine = make_engine(store, prefetch_workers=workers)
    handle = engine.submit_prefetch("r", keys(*range(32)))
    assert eventually(lambda: store.running == workers)
    store.gate.set()
    assert handle.wait(60) is READY
    assert store.most_running == workers == engine.stats().threads


def test_max_pending_prefetch_gives_the_lowest_priority_up(make_engine: MakeEngine) -> None:
    """covers: C4"""
    store = ScriptedStore(range(32), is_open=False)
    engine = make_engine(store, prefetch_workers=1, max_pending_prefetch=2)
    low = engine.submit_prefetch("low", keys(1), LOW)
    normal = engine.submit_prefetch("normal", keys(2), NORMAL)
    refused = engine.submit_prefetch("refused", keys(3), LOW)
    assert (refused.outcome, refused.failed) == (FAILED, {0})
    high = engine.submit_prefetch("high", keys(4), HIGH)
    assert low.outcome is FAILED
    assert engine.stats().shed == 2
    assert engine.stats().pending == 2
    store.gate.set()
    assert (normal.wait(60), high.wait(60)) == (READY, READY)


def test_max_pending_prefetch_is_not_for_blocks_that_the_device_waits_for(make_engine: MakeEngine) -> None:
    store = ScriptedStore(range(32), is_open=False)
    engine = make_engine(store, max_pending_prefetch=1)
    handles = [engine.submit_prefetch(str(n), keys(n), URGENT, lambda index, block: None) for n in range(5)]
    waiting = engine.submit_prefetch("waiting", keys(9), LOW)
    store.gate.set()
    assert {handle.wait(60) for handle in [*handles, waiting]} == {READY}


def test_prefetch_cache_size_bounds_memory(make_engine: MakeEngine) -> None:
    """covers: C4, C5"""
    engine = make_engine(ScriptedStore(range(64)), prefetch_cache_size=6)
    for number in range(0, 64, 4):
        engine.submit_prefetch(str(number), keys(*range(number, number + 4))).wait(60)
        assert engine.stats().cache_bytes <= 6 * BLOCK_BYTES
    assert engine.stats().cache_blocks == 6
    large = engine.submit_prefetch("large", keys(*range(8)))
    assert large.wait(60) is FAILED
    assert large.failed == {6, 7}


@pytest.mark.parametrize(("size", "room", "most"), [(1000, 6, 6), (1000, 6.9, 6), (4, 6, 4), (1000, 1, 1)])
def test_prefetch_cache_bytes_bounds_memory(make_engine: MakeEngine, size: int, room: float, most: int) -> None:
    """covers: C4, C5. The smaller of both bounds holds; `allocate` makes page-locked memory where a device wants it."""
    engine = make_engine(
        ScriptedStore(range(64)), prefetch_cache_size=size, prefetch_cache_bytes=int(room * BLOCK_BYTES)
    )
    for number in range(0, 64, 4):
        engine.submit_prefetch(str(number), keys(*range(number, number + 4))).wait(60)
        assert engine.stats().cache_bytes <= room * BLOCK_BYTES
    assert (engine.stats().cache_blocks, engine.options.prefetch_cache_size) == (most, most)


def test_prefetch_cache_bytes_by_default() -> None:
    """The bytes of a memory store: a thousand large blocks would be more than most hosts can lock."""
    large = 16 << 20
    assert PrefetchOptions().for_blocks_of(large).prefetch_cache_size * large == 4 << 30
    assert PrefetchOptions().for_blocks_of(1 << 20).prefetch_cache_size == 1000
    assert PrefetchOptions.resolve({"prefetch_cache_bytes": "1GiB"}, "prefetch").prefetch_cache_bytes == 1 << 30


def test_prefetch_cache_bytes_below_one_block() -> None:
    with pytest.raises(
        UcmConfigError, match=r"prefetch_cache_bytes: found 63 bytes, expected room for one block of 64"
    ):
        PrefetchEngine(ScriptedStore(), BLOCK_BYTES, PrefetchOptions(prefetch_cache_bytes=63))


def test_the_deadline_gives_up_what_does_not_come(make_engine: MakeEngine) -> None:
    """covers: C7"""
    clock = Clock()
    store = ScriptedStore(range(32), is_open=False)
    engine = make_engine(store, clock=clock, prefetch_workers=1, deadline=3.0)
    handle = engine.submit_prefetch("r", keys(0, 1))
    patient = engine.submit_prefetch("patient", keys(2), deadline=50.0)
    assert eventually(lambda: store.running == 1)
    clock.now += 2.9
    assert engine.outcome("r") is None
    clock.now += 0.2
    assert engine.outcome("r") is TIMEOUT
    assert handle.failed == {0, 1}
    assert engine.wait_for_completion("r", 5) is TIMEOUT
    store.gate.set()
    assert patient.wait(60) is READY
    assert store.order == keys(0, 2)


def test_a_wait_without_a_limit_ends_with_the_deadline(make_engine: MakeEngine) -> None:
    store = ScriptedStore([0], is_open=False)
    engine = make_engine(store, deadline=0.05)
    engine.submit_prefetch("r", keys(0))
    assert engine.wait_for_completion("r") is TIMEOUT


def test_urgent_overtakes_a_large_request_in_the_middle(make_engine: MakeEngine) -> None:
    """covers: C1, C3"""
    store = ScriptedStore(range(200), is_open=False)
    engine = make_engine(store, prefetch_workers=1, ageing=1000.0)
    low = engine.submit_prefetch("low", keys(*range(100)), LOW)
    assert eventually(lambda: store.running == 1)
    engine.submit_prefetch("normal", keys(150), NORMAL)
    engine.submit_prefetch("second", keys(152), URGENT)
    engine.submit_prefetch("third", keys(153), URGENT)
    store.gate.set()
    assert low.wait(60) is READY
    assert store.order[:5] == keys(0, 152, 153, 150, 1)


def test_a_request_is_moved_when_its_priority_changes(make_engine: MakeEngine) -> None:
    store = ScriptedStore(range(200), is_open=False)
    engine = make_engine(store, prefetch_workers=1, ageing=1000.0)
    engine.submit_prefetch("first", keys(0), URGENT)
    assert eventually(lambda: store.running == 1)
    engine.submit_prefetch("a", keys(1), NORMAL)
    engine.submit_prefetch("b", keys(2), LOW)
    engine.submit_prefetch("c", keys(3), URGENT)
    assert engine.stats().queue_depth == {URGENT: 1, HIGH: 0, NORMAL: 1, LOW: 1}
    assert engine.reprioritise("b", URGENT)
    assert engine.reprioritise("c", LOW)
    store.gate.set()
    assert engine.wait_for_completion("c", 5) is READY
    assert store.order == keys(0, 2, 1, 3)


@pytest.mark.parametrize(("ageing", "expected"), [(1.0, [1, 2, 3]), (100.0, [2, 3, 1])])
def test_ageing_serves_the_lowest_priority_in_the_end(
    make_engine: MakeEngine, ageing: float, expected: list[int]
) -> None:
    clock = Clock()
    store = ScriptedStore(range(200), is_open=False)
    engine = make_engine(store, clock=clock, prefetch_workers=1, ageing=ageing, deadline=1000.0)
    engine.submit_prefetch("first", keys(0), URGENT)
    assert eventually(lambda: store.running == 1)
    low = engine.submit_prefetch("low", keys(1), LOW)
    clock.now += 4.0
    urgent = [engine.submit_prefetch(f"urgent {n}", keys(n), URGENT) for n in (2, 3)]
    store.gate.set()
    assert {handle.wait(500) for handle in [low, *urgent]} == {READY}
    assert store.order == [key(0), *keys(*expected)]


def test_unknown_options_are_refused() -> None:
    """covers: C4"""
    with pytest.raises(UcmConfigError, match=r"prefetch\.prefetch_worker: found an unknown key, expected .*workers"):
        PrefetchOptions.resolve({"prefetch_worker": 2}, "prefetch")
    with pytest.raises(UcmConfigError, match=r"prefetch\.deadline: found 0, expected number, above 0"):
        PrefetchOptions.resolve({"deadline": 0}, "prefetch")


def test_defaults_are_the_seeds() -> None:
    options = PrefetchOptions()
    assert (options.prefetch_workers, options.max_pending_prefetch) == (4, 64)
    assert (options.prefetch_ahead, options.prefetch_cache_size) == (2, 1000)


@pytest.mark.parametrize(
    ("position", "priority"),
    [(0, URGENT), (1, HIGH), (4, HIGH), (5, NORMAL), (16, NORMAL), (17, LOW), (1000, LOW)],
)
def test_priority_by_position(position: int, priority: PrefetchPriority) -> None:
    assert PrefetchPriority.compute_priority(position) is priority
