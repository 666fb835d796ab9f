"""Which waiting requests are asked about, and what becomes of the answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.prefetch.stores import ScriptedStore, eventually, keys
from vllm_gaudi_ucm.connector.lookup import LookupThread
from vllm_gaudi_ucm.connector.waiting_prefetch import OPEN_LOOKUPS, WaitingPrefetch, apply_plan
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.plan import PrefetchPlan
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome


@dataclass
class Waiting:
    request_id: str
    keys: list[bytes] | None


class SlowLookups(ScriptedStore):
    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(numbers)
        self.answers = threading.Event()
        self.asked = 0

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked += 1
        assert self.answers.wait(60)
        return super().lookup(keys)


def made(store: ScriptedStore, batch_size: int = 4, deadline: float = 60.0, **options: Any) -> WaitingPrefetch:
    def wanted(request: Any) -> list[bytes] | None:
        return request.keys

    return WaitingPrefetch(PrefetchOptions(**options), batch_size, LookupThread(store, deadline), wanted)


def submitted(plan: PrefetchPlan) -> dict[str, int]:
    return {prefetch.request_id: len(prefetch.keys) for prefetch in plan.submit}


def test_only_what_the_store_holds_from_the_first_block_on() -> None:
    store = SlowLookups([1, 2, 4, 7])
    waiting: list[Any] = [
        Waiting("a", keys(1, 2, 3, 4)),
        Waiting("b", None),
        Waiting("c", keys(5)),
        Waiting("d", keys(7)),
    ]
    planning = made(store)
    assert not planning.plan(waiting), "the store has not answered, and nobody waits for it"
    store.answers.set()
    found: dict[str, int] = {}

    def all_answered() -> bool:
        found.update(submitted(planning.plan(waiting)))
        return found == {"a": 2, "d": 1}

    assert eventually(all_answered)
    assert store.asked == 3, "once for each request that wants blocks"
    assert set(planning.plan(waiting[1:]).cancel) == {"a"}
    planning.forget("d")
    assert planning.num_requests == 2


def test_few_questions_are_open_at_once() -> None:
    """Requests whose turn has come ask through the same thread."""
    store = SlowLookups(range(100))
    planning = made(store, batch_size=20)
    waiting: list[Any] = [Waiting(str(number), keys(number)) for number in range(20)]
    for _ in range(3):
        planning.plan(waiting)
    assert planning.num_requests == OPEN_LOOKUPS
    store.answers.set()
    found: dict[str, int] = {}

    def all_answered() -> bool:
        found.update(submitted(planning.plan(waiting)))
        return len(found) == 20

    assert eventually(all_answered)


@pytest.mark.parametrize(("ahead", "reached"), [(0, 0), (1, 2), (2, 4)])
def test_requests_out_of_reach_are_not_asked_about(ahead: int, reached: int) -> None:
    """covers: C4"""
    planning = made(ScriptedStore(range(100)), batch_size=2, prefetch_ahead=ahead)
    planning.plan([Waiting(str(number), keys(number)) for number in range(20)])  # type: ignore[misc]
    assert planning.num_requests == reached


def test_the_worker_does_what_the_plan_says() -> None:
    store = ScriptedStore([1, 2, 3], is_open=False)
    engine = PrefetchEngine(store, 64, PrefetchOptions(prefetch_workers=1))
    engine.start()
    planning = made(store)
    waiting: list[Any] = [Waiting("a", keys(1)), Waiting("b", keys(2, 3))]

    def both_planned() -> bool:
        apply_plan(engine, planning.plan(waiting))
        return engine.stats().pending == 2

    assert eventually(both_planned)
    # a load of the same request has an id of its own: the end of its waiting does not cancel it
    load = engine.submit_prefetch("a", keys(1), deliver=lambda index, block: None)
    apply_plan(engine, planning.plan(waiting[1:]))
    store.gate.set()
    assert load.wait(60) is PrefetchOutcome.READY
    assert eventually(lambda: engine.stats().cache_blocks == 3)
    assert engine.stop(5)


def test_a_question_that_was_too_old_to_be_asked_is_asked_again() -> None:
    """covers: F8. A store that was stuck for longer than the deadline answers later ones."""
    store = SlowLookups([1, 2])
    waiting: list[Any] = [Waiting("a", keys(1)), Waiting("b", keys(2))]
    planning = made(store, deadline=0.05)
    assert not planning.plan(waiting)
    late = planning._asked["b"]
    assert late is not None
    assert eventually(lambda: time.monotonic() - late.asked > 0.05)
    store.answers.set()
    assert eventually(lambda: late.is_late)
    found: dict[str, int] = {}
    assert eventually(lambda: found.update(submitted(planning.plan(waiting))) or len(found) == 2)
    assert store.asked == 2


def test_nobody_asks_for_a_request_that_has_gone() -> None:
    """covers: F8"""
    store = SlowLookups([1, 2, 3])
    planning = made(store)
    planning.plan([Waiting("a", keys(1)), Waiting("b", keys(2)), Waiting("c", keys(3))])
    planning.forget("b")
    last = planning._asked["c"]
    store.answers.set()
    assert eventually(lambda: last.hits is not None)
    assert store.asked == 2
