"""Lookups while buckets become warm: total, the cheapest warm one, never a cold one; the order of what comes next."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs.shapes import COST, LIMITS, ODD_LIMITS, steps
from tests.graphs.warm_up.look_up import look_up
from tests.graphs.warm_up.sets import SERVER, bucket_sets, cheapest_warm, keys_of, server_buckets, usages
from vllm_gaudi_ucm.graphs.lookup import BucketSet, NotWarmError
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, dominates
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.warm_up.order import choose_skeleton
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets

DECODE = ForwardShape("--u", 16, 0, 100)
PROMPT = ForwardShape("c--", 200, 0, 0)


def skeleton_ready(buckets: BucketSet, usage: Steps | None = None, count: int = 1) -> ReadyBuckets:
    ready = ReadyBuckets(buckets, usage)
    for key in choose_skeleton(buckets, usage, count).keys:
        ready.mark_warm(key)
    return ready


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_every_lookup_on_the_way_is_total_and_the_cheapest_warm(data: st.DataObject) -> None:
    """Whatever is warmed or dropped in whatever order; covers: B1."""
    buckets = data.draw(bucket_sets())
    ready = skeleton_ready(buckets)
    for key in data.draw(st.permutations(sorted(ready.cold, key=str))):
        if data.draw(st.booleans()):
            ready.mark_warm(key)
        else:
            ready.drop(key, "no room")
        warm = [key for key in keys_of(buckets) if ready.is_warm(key)]
        step = data.draw(steps(buckets.limits))
        found = look_up(ready, step)
        assert dominates(found, step)
        assert found.forward in warm
        assert found.logits in (0, *warm)
        assert ready.logits_rows(step.logits) == found.logits
        assert COST.step(found) == pytest.approx(COST.step(cheapest_warm(warm, step)), rel=1e-12)
    assert ready.next_cold() is None
    assert ready.progress == (len(warm_keys := [k for k in keys_of(buckets) if ready.is_warm(k)]), len(warm_keys))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_next_cold_comes_to_every_bucket_once(data: st.DataObject) -> None:
    """Nothing is left cold, whether or not steps ask for it; covers: B4."""
    buckets = data.draw(bucket_sets())
    ready = ReadyBuckets(buckets, data.draw(usages(buckets.limits)))
    order = []
    while (key := ready.next_cold()) is not None:
        order.append(key)
        ready.mark_warm(key)
    assert sorted(order, key=str) == sorted(keys_of(buckets), key=str)
    assert set(order[:2]) == {buckets.limits.maximum.forward, buckets.limits.maximum.logits}
    step = data.draw(steps(buckets.limits))
    assert look_up(ready, step) == buckets.lookup(step)


def test_lookups_in_another_thread_never_see_a_cold_bucket() -> None:
    """What a lookup returns was warm when it returned; the set changes under it all the time."""
    buckets = server_buckets()
    ready = skeleton_ready(buckets, count=4)
    most = np.array(SERVER.maximum[1:5])
    asked = [Bucket("csu", *sizes) for sizes in np.random.default_rng(1).integers(1, most + 1, (400, 4)).tolist()]
    asked += [Bucket("--u", rows, 0, rows * 8, rows) for rows in range(1, 65)]
    failures: list[tuple[Bucket, Bucket]] = []
    looked_up, done = threading.Semaphore(0), threading.Event()

    def keep_looking() -> None:
        while not done.is_set():
            for step in asked:
                found = look_up(ready, step)
                if not (dominates(found, step) and ready.is_warm(found.forward) and ready.is_warm(found.logits)):
                    failures.append((step, found))
            looked_up.release()

    thread = threading.Thread(target=keep_looking)
    thread.start()
    for index in range(len(ready.cold)):
        key = ready.next_cold()
        assert key is not None
        if index % 5 == 0:
            ready.drop(key, "no room")
        else:
            ready.mark_warm(key)
        if index % 10 == 0:
            assert looked_up.acquire(timeout=60)
    done.set()
    thread.join(60)
    assert not failures
    assert not ready.cold


def test_live_steps_change_what_is_next() -> None:
    """The usage says prompts; then decodes come."""
    buckets = BucketSet([DECODE, PROMPT], (), LIMITS, COST)
    usage = Steps.from_buckets([Bucket("c--", 180, 0, 0, 1)] * 5)
    ready = skeleton_ready(buckets, usage)
    assert ready.next_cold() == PROMPT
    for _ in range(20_000):
        assert look_up(ready, Bucket("--u", 4, 0, 30, 4)) == LIMITS.maximum
    assert ready.next_cold() == DECODE


def test_steps_that_run_in_their_bucket_do_not_count() -> None:
    buckets = BucketSet([DECODE, PROMPT], (), LIMITS, COST)
    ready = skeleton_ready(buckets, Steps.from_buckets([Bucket("c--", 180, 0, 0, 1)] * 5))
    ready.mark_warm(DECODE)
    for _ in range(20_000):
        assert look_up(ready, Bucket("--u", 4, 0, 30, 4)).forward == DECODE
    assert ready.next_cold() == PROMPT


def test_what_saves_nothing_any_more_comes_later() -> None:
    """A second decode bucket of nearly the same size waits for the prompts', although decodes are most of the steps."""
    larger = ForwardShape("--u", 16, 0, 102)
    buckets = BucketSet([DECODE, larger, PROMPT], (), LIMITS, COST)
    usage = Steps.from_buckets([Bucket("--u", 9, 0, 100, 9)] * 50 + [Bucket("c--", 180, 0, 0, 1)] * 5)
    ready = skeleton_ready(buckets, usage)
    order = []
    while (key := ready.next_cold()) is not None:
        order.append(key)
        ready.mark_warm(key)
    assert order[1] == PROMPT
    assert {order[0], order[2]} == {DECODE, larger}


@pytest.mark.parametrize("name", ODD_LIMITS)
def test_odd_limits(name: str) -> None:
    """covers: A17, B7."""
    within = ODD_LIMITS[name]
    ready = skeleton_ready(server_buckets(within, 24))
    assert look_up(ready, within.maximum) == within.maximum
    while (key := ready.next_cold()) is not None:
        ready.mark_warm(key)
    assert look_up(ready, within.maximum) == within.maximum


def test_before_the_maximum_is_warm_there_is_no_lookup() -> None:
    ready = ReadyBuckets(BucketSet([DECODE], [4], LIMITS, COST))
    ready.mark_warm(DECODE)
    ready.mark_warm(LIMITS.maximum.forward)
    with pytest.raises(NotWarmError, match="run the skeleton first"):
        look_up(ready, Bucket("--u", 4, 0, 30, 4))
    assert ready.next_cold() == 16


def test_what_must_not_be_dropped_or_warmed_is_refused() -> None:
    ready = skeleton_ready(BucketSet([DECODE, PROMPT], [4], LIMITS, COST))
    ready.mark_warm(DECODE)
    ready.drop(PROMPT, "too large")
    assert ready.dropped == {PROMPT: "too large"}
    assert ready.progress == (3, 4)
    with pytest.raises(ValueError, match="configured maximum"):
        ready.drop(LIMITS.maximum.forward, "")
    with pytest.raises(ValueError, match="bucket --u 16 0 100 is warm"):
        ready.drop(DECODE, "")
    with pytest.raises(ValueError, match="too large"):
        ready.mark_warm(PROMPT)
    with pytest.raises(KeyError, match="5 logits rows is not one of the 5 buckets"):
        ready.mark_warm(5)
