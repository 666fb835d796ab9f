"""The scheduler's half: what is asked, loaded, saved, and how its options change that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.scheduler_side import Side, make_request, matched, scheduled
from tests.prefetch.stores import eventually
from vllm_gaudi_ucm.connector.lookup import GRACE_SECONDS
from vllm_gaudi_ucm.connector.metadata import BlockLoad
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.vllm_api.blocks import isolate_blocks, share_blocks


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Side] = []

    def make(**changes: Any) -> Side:
        made.append(Side(tmp_path, monkeypatch, **changes))
        return made[-1]

    yield make
    for one in made:
        one.side.close()


@pytest.mark.parametrize(("count", "hits"), [(15, 0), (16, 0), (17, 16), (64, 48), (65, 64), (200, 64)])
def test_the_last_token_is_never_loaded(sides: Any, count: int, hits: int) -> None:
    side = sides()
    side.save(64)
    request = make_request("second", count)
    side.side.begin(request)
    assert matched(side, request) == hits


def test_what_the_device_has_is_not_loaded(sides: Any) -> None:
    side = sides()
    keys = side.save(64)
    request = make_request("second", 70)
    side.side.begin(request)
    assert matched(side, request, computed=32) == 32
    side.side.admitted(request, [[7, 8, 9, 10, 11]], 32)
    (load,) = side.side.metadata(scheduled()).loads
    assert (load.keys, load.block_ids) == (keys[2:4], [9, 10])
    assert side.side.metadata(scheduled()).loads == []


@pytest.mark.parametrize(("least", "hits"), [(1, 32), (2, 32), (3, 0)])
def test_min_hit_blocks(sides: Any, least: int, hits: int) -> None:
    side = sides(options={"min_hit_blocks": least})
    side.save(32)
    request = make_request("second", 80)
    side.side.begin(request)
    assert matched(side, request) == hits


def test_each_block_is_saved_once_and_drafts_are_not(sides: Any) -> None:
    """covers: C20"""
    side = sides()
    request = make_request("a", 40)
    side.side.begin(request)
    assert [save.block_id for save in side.side.metadata(scheduled(a=20)).saves] == [100]
    request.num_computed_tokens = 20
    # 20 tokens of the prompt and 10 drafts, which would fill the third block
    assert [save.block_id for save in side.side.metadata(scheduled(a=30)).saves] == [101]
    request.all_token_ids += list(range(8))
    request.num_tokens, request.num_computed_tokens = 48, 40
    assert [save.block_id for save in side.side.metadata(scheduled(a=8)).saves] == [102]
    twin = make_request("b", 40)
    side.side.begin(twin)
    assert side.side.metadata(scheduled(b=40)).saves == []


def test_what_may_be_computed_again_is_saved_later(sides: Any) -> None:
    """A step on blocks that were guessed may be repeated: what it fills is not stored before it stands."""
    guesses = {"a"}
    # no prompt remainder is so short that records of its blocks are saved
    side = sides(
        offload=SimpleNamespace(method=BlockOptions(), max_remainder=-1, is_guess=lambda name: name in guesses)
    )
    request = make_request("a", 40, num_prompt_tokens=40)
    side.side.begin(request)
    assert side.side.metadata(scheduled(a=20)).saves == []
    guesses.clear()
    request.num_computed_tokens = 20
    assert [save.block_id for save in side.side.metadata(scheduled(a=20)).saves] == [100, 101]


@pytest.mark.parametrize("change", [{"options": {"save": False}}, {"role": "kv_consumer"}])
def test_nothing_is_saved(sides: Any, change: dict[str, Any]) -> None:
    side = sides(**change)
    assert side.save(64) == []


def test_a_producer_loads_nothing(sides: Any) -> None:
    side = sides(role="kv_producer")
    assert len(side.save(64)) == 4
    request = make_request("second", 70)
    side.side.begin(request)
    assert side.side.matched_tokens(request, 0) == 0
    assert side.store.looked_up == 0


def test_a_failed_load_is_not_tried_again_and_its_blocks_are_saved_again(sides: Any) -> None:
    """covers: C8"""
    side = sides()
    side.save(64)
    request = make_request("second", 70)
    side.side.begin(request)
    assert matched(side, request) == 64
    side.side.admitted(request, [[1, 2, 3, 4, 5]], 64)
    side.side.metadata(scheduled())
    side.side.lost({3}, [])
    side.side.loaded({"second"})
    assert side.side.matched_tokens(request, 0) == 0
    assert [save.block_id for save in side.side.metadata(scheduled(second=70)).saves] == [102]


@pytest.mark.parametrize("deadline", [0.05, 5.0])
def test_lookup_deadline(sides: Any, deadline: float) -> None:
    """covers: D4"""
    side = sides(options={"lookup_deadline": deadline})
    side.save(64)
    side.store.lookup_seconds = 0.3
    request = make_request("second", 70)
    side.side.begin(request)
    assert side.side.matched_tokens(request, 0) is None
    assert matched(side, request) == (64 if deadline > 1 else 0)
    assert side.side.counts.timeouts == (deadline < 1)


@pytest.mark.parametrize("patience", [1.0, 0.0])
def test_blocks_on_their_way_to_the_store_are_waited_for(
    sides: Any, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker then stores them at once. Saves that do not wait for idle times are not waited for."""
    monkeypatch.setattr("vllm_gaudi_ucm.connector.lookup.SAVES_SECONDS", 60.0)
    side = sides(options={"save_patience": patience})
    keys = side.save(64)
    del side.store.blocks[keys[2]], side.store.blocks[keys[3]]
    request = make_request("second", 70)
    side.side.begin(request)
    hurried = []
    for _ in range(1000):
        found = side.side.matched_tokens(request, 0)
        hurried.append(side.side.metadata(scheduled()).hurries_saves)
        if found is not None:
            break
        if any(hurried):
            side.store.blocks.update({keys[2]: b"", keys[3]: b""})
    assert found == (64 if patience else 32)
    assert any(hurried) == (patience > 0)
    assert side.side.counts.requests == 1


def test_long_steps_leave_time_to_store(sides: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait reaches the worker when a step begins, and the time is over when it ends."""
    monkeypatch.setattr("vllm_gaudi_ucm.connector.lookup.SAVES_SECONDS", 0.0)
    side = sides(options={"save_patience": 1.0})
    keys = side.save(64)
    del side.store.blocks[keys[3]]
    request = make_request("second", 70)
    side.side.begin(request)
    while not side.side.metadata(scheduled()).hurries_saves:
        assert side.side.matched_tokens(request, 0) is None
    assert eventually(lambda: side.side._states["second"].lookup.hits == 3), "answered before the step has stored"
    side.store.blocks[keys[3]] = b""
    assert matched(side, request) == 64


def test_blocks_that_do_not_arrive_are_not_waited_for(sides: Any) -> None:
    side = sides(options={"save_patience": 1.0})
    keys = side.save(64)
    del side.store.blocks[keys[3]]
    request = make_request("second", 70)
    side.side.begin(request)
    assert matched(side, request) == 48
    assert side.side._states["second"].lookup.again_until is not None
    # what the store has said before is not on its way, but gone
    side.side.known.found(keys)
    other = make_request("third", 70)
    side.side.begin(other)
    assert matched(side, other) == 48
    assert side.side._states["third"].lookup.again_until is None


class Clock:
    """Seconds that pass while somebody waits. waits: how long each time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now


class NeverSet(threading.Event):
    """An answer that does not come."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None, "nobody waits for ever"
        self._clock.waits.append(timeout)
        self._clock.now += timeout
        return False


@pytest.fixture
def slow_side(sides: Any) -> Iterator[tuple[Side, Clock]]:
    """A store that does not answer, and time that passes only while somebody waits."""
    side, clock = sides(options={"lookup_deadline": 1.0}), Clock()
    answers = threading.Event()
    lookups = side.side._lookups
    lookups._clock = clock
    ask = lookups.ask

    def answer(keys: Any) -> list[bool]:
        side.store.looked_up += 1
        answers.wait(60)
        return [True] * len(keys)

    def asked(*given: Any) -> Any:
        lookup = ask(*given)
        lookup.answered = NeverSet(clock)
        return lookup

    lookups.ask, side.store.lookup = asked, answer
    side.answers = answers
    yield side, clock
    answers.set()


def test_requests_that_wait_for_a_slow_store_share_the_time_of_a_step(slow_side: tuple[Side, Clock]) -> None:
    """covers: F8. A step waits no longer for eighty of them than for one, and the next one as long again."""
    side, clock = slow_side
    requests = [make_request(f"r{number}", 70) for number in range(80)]
    for request in requests:
        side.side.begin(request)
    for step in range(1, 4):
        assert [side.side.matched_tokens(request, 0) for request in requests] == [None] * 80
        assert sum(clock.waits) == pytest.approx(step * GRACE_SECONDS)
        side.side.metadata(scheduled())
    assert side.side.counts.timeouts == 0


def test_questions_that_nobody_waits_for_are_not_asked(slow_side: tuple[Side, Clock]) -> None:
    """covers: F8. Those of requests that have ended, that run, or that want other blocks now, and those too old."""
    side, clock = slow_side
    requests = [make_request(name, 70) for name in ("first", "ended", "runs", "other", "late")]
    for request in requests:
        side.side.begin(request)
        side.side.matched_tokens(request, 0)
        assert eventually(lambda: side.store.looked_up == 1), "the store is stuck with the first one"
    side.side.end("ended")
    side.side.runs(requests[2])
    side.side.matched_tokens(requests[3], 32)
    clock.now += 0.5
    wanted = make_request("wanted", 70)
    side.side.begin(wanted)
    side.side.matched_tokens(wanted, 0)
    lookups = {name: side.side._states[name].lookup for name in ("first", "other", "late", "wanted")}
    clock.now += 0.6
    side.answers.set()
    assert eventually(lambda: lookups["wanted"].hits is not None)
    assert [lookup.hits for lookup in lookups.values()] == [4, None, None, 4]
    assert side.store.looked_up == 2
    # whoever has not got an answer does without one
    assert side.side.matched_tokens(requests[4], 0) == 0
    assert side.side.counts.timeouts == 1


def test_extra_keys_that_are_no_plain_data_are_not_stored(sides: Any) -> None:
    """covers: D5"""
    side = sides()
    request = make_request("odd", 70, cache_salt=object())
    side.side.begin(request)
    assert side.side.matched_tokens(request, 0) == 0
    assert side.side.metadata(scheduled(odd=70)).saves == []
    assert side.side.num_requests == 0


def test_after_a_reset_nothing_is_found_and_everything_is_saved(sides: Any) -> None:
    side = sides()
    side.save(64)
    blocks = dict(side.store.blocks)
    assert side.side.clear()
    side.store.blocks.update(blocks)  # a server that others share keeps them
    request = make_request("second", 70)
    side.side.begin(request)
    assert matched(side, request) == 0
    assert len(side.side.metadata(scheduled(second=70)).saves) == 4


def test_a_request_that_runs_through_a_reset_stores_nothing_more(sides: Any) -> None:
    """What it computes rests on what was computed before."""
    side = sides()
    running, waiting = make_request("running", 70, num_computed_tokens=32), make_request("waiting", 70)
    side.side.begin(running)
    side.side.begin(waiting)
    side.side.clear()
    saves = side.side.metadata(scheduled(running=38, waiting=70)).saves
    assert len(saves) == 4
    assert side.side.num_requests == 1


def test_after_a_reset_a_session_is_what_it_was(sides: Any) -> None:
    """covers: D2 F2. Its newest input is dense, and its blocks are still those of a sparse request."""
    side = sides(ucm={"ucm_sparse_method": "GSA"})
    session, dense = (make_request(name, 70) for name in ("on", "off"))
    isolate_blocks(dense, "ucm dense")
    for request in (session, dense):
        side.side.begin(request)
    side.side.next_input(session)
    side.side.clear()
    saves = side.side.metadata(scheduled(on=70, off=70)).saves
    assert len({save.key for save in saves}) == 8


def test_a_dense_session_that_becomes_sparse_is_stored_as_a_sparse_one(sides: Any) -> None:
    """covers: D2 F2. All of it, so that requests find its beginning, too."""
    side = sides(ucm={"ucm_sparse_method": "GSA"})
    session, dense, sparse = (make_request(name, 70) for name in ("session", "dense", "sparse"))
    for request in (session, dense):
        isolate_blocks(request, "ucm dense")
    for request in (session, dense, sparse):
        side.side.begin(request)

    def keys(name: str, count: int) -> list[bytes]:
        # each is told of as if nothing were stored
        side.side.known.clear()
        return [save.key for save in side.side.metadata(scheduled(**{name: count})).saves]

    assert keys("session", 40) == keys("dense", 40)
    session.num_computed_tokens = 40
    share_blocks(session)
    side.side.next_input(session)
    found = keys("session", 30)
    assert len(found) == 4
    assert found == keys("sparse", 70)


def test_blocks_that_are_away_are_not_stored(sides: Any) -> None:
    """covers: C8. Memory mode puts the null block in their place."""
    side = sides()
    request = make_request("sparse", 70, num_computed_tokens=48)
    side.side.begin(request)
    side.side._saves._block_tables = lambda request_id: [[7, 0, 0, 9, 11]]
    assert [save.block_id for save in side.side.metadata(scheduled(sparse=22)).saves] == [7, 9]
    assert len(side.side.known) == 2


def test_what_the_store_has_said_is_asked_again_after_a_preemption(sides: Any) -> None:
    """covers: A3 C8. The store has got the blocks since, or lost them."""
    side = sides()
    request = make_request("second", 70)
    side.side.begin(request)
    assert matched(side, request) == 0
    side.side.runs(request)
    side.save(64)
    assert matched(side, request) == 64
    side.side.runs(request)
    side.store.clear()
    assert matched(side, request) == 0


@pytest.mark.parametrize("preemptions", [0, 1])
def test_a_preempted_request_loads_whole_whatever_was_asked_before(sides: Any, preemptions: int) -> None:
    side = sides()
    keys = side.save(64)
    side.store.blocks[b"record"] = b""
    part = BlockLoad("second", keys[:1], [7], is_partial=True)
    side.side._partial = SimpleNamespace(record_keys=lambda *given: [b"record"], plan=lambda *given: part)
    request = make_request("second", 70, num_preemptions=0)
    side.side.begin(request)
    assert matched(side, request) == 64
    request.num_preemptions = preemptions
    side.side.admitted(request, [[7, 8, 9, 10, 11]], 64)
    (load,) = side.side.metadata(scheduled()).loads
    assert load.keys == keys[: 4 if preemptions else 1]
    assert load.is_partial == (not preemptions)


def test_what_an_ended_request_used_is_sent(sides: Any) -> None:
    """Loaded and saved blocks, in the order of the context, once."""
    side = sides()
    keys = side.save(64)
    assert side.side.metadata(scheduled()).used == [keys]
    assert side.side.metadata(scheduled()).used == []
    request = make_request("second", 70)
    side.side.begin(request)
    assert matched(side, request, computed=32) == 32
    side.side.end("second")
    assert side.side.metadata(scheduled()).used == [keys[2:]]
    side.side.begin(make_request("short", 3))
    side.side.end("short")
    assert side.side.metadata(scheduled()).used == []
