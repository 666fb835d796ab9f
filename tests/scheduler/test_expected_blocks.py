"""The most blocks that requests will probably use: against draws of how long their answers become."""

from __future__ import annotations

import random
from statistics import NormalDist

import numpy as np
import pytest

from vllm_gaudi_ucm.config.scheduler_config import SchedulerConfig
from vllm_gaudi_ucm.scheduler.admission_rules import Exact, Predicted, SafetyMargin, make_rule
from vllm_gaudi_ucm.scheduler.expected_blocks import expected_peak
from vllm_gaudi_ucm.scheduler.future_blocks import Footprint, peak_blocks
from vllm_gaudi_ucm.scheduler.output_lengths import MOST_SEEN, OutputLengths

BLOCK = 4
MOST = 400


def lengths_of(seen: list[int]) -> OutputLengths:
    lengths = OutputLengths()
    for length in seen:
        lengths.add(length)
    return lengths


def test_answers_are_as_long_as_those_before_that_were_longer() -> None:
    """One more than were seen never ends."""
    lengths = lengths_of(list(range(1, 100)))
    alive = lengths.alive(np.array([0, 50]), np.array([0, 25, 50, 98, 99]))
    np.testing.assert_allclose(alive, [[1, 0.75, 0.5, 0.02, 0.01], [1, 0.5, 0.02, 0.02, 0.02]])


def test_few_longer_answers_say_little_and_none_nothing() -> None:
    lengths = lengths_of([10] * 50 + [100] * 3)
    assert lengths.alive(np.array([20, 100]), np.array([0, 500])).tolist() == [[1, 0.25], [1, 1]]


def test_only_the_latest_answers_count() -> None:
    lengths = lengths_of([50] * MOST_SEEN + [5] * MOST_SEEN)
    assert len(lengths) == MOST_SEEN
    assert lengths.alive(np.array([0]), np.array([4, 5])).tolist() == [[1, 1 / (MOST_SEEN + 1)]]


@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_the_cache_is_enough_at_any_time_as_often_as_promised(confidence: float) -> None:
    """Requests of any age, whose answers have lengths from the same distribution."""
    rng = random.Random(5)

    def draw() -> int:
        return min(MOST, max(1, round(60 * rng.lognormvariate(0, 0.8))))

    lengths = lengths_of([draw() for _ in range(MOST_SEEN)])
    running = [(rng.randint(1, 120), rng.randint(0, 40)) for _ in range(24)]
    found = [
        Footprint(range(100 * place, 100 * place - (-(prompt + done) // BLOCK)), prompt + done, MOST - done, 0, done)
        for place, (prompt, done) in enumerate(running)
    ]
    room = expected_peak(found, lengths, BLOCK, NormalDist().inv_cdf(confidence), least=0)
    enough = np.zeros(MOST)
    for _ in range(400):
        ends = []
        for _, done in running:
            length = draw()
            while length <= done:
                length = draw()
            ends.append(length - done)
        used = [
            sum(-(-(one.tokens + step) // BLOCK) for one, end in zip(found, ends, strict=True) if end > step)
            for step in range(MOST)
        ]
        enough += np.array(used) <= room
    # the draws and those that `lengths` has seen differ a little
    assert enough.min() / 400 >= confidence - 0.1
    assert room < peak_blocks(found, BLOCK), "else it would be no better than exact"


def test_shared_blocks_count_once() -> None:
    lengths = lengths_of([8] * MOST_SEEN)
    found = [Footprint([1, 2, 3, 10 + place], 16, 400) for place in range(4)]
    # all are there until they have 7 tokens more, for which each needs two blocks beside its own one
    assert expected_peak(found, lengths, BLOCK, 0.0, least=0) == 3 + 4 * (1 + 2)


def test_windows_are_full_soon() -> None:
    """Five blocks of each of two groups, and two of each of three windows."""
    lengths = lengths_of([8] * MOST_SEEN)
    found = [Footprint([place, 50 + place], 13, 400, 0, 0, 2, (2, 2, 2)) for place in range(4)]
    assert expected_peak(found, lengths, BLOCK, 0.0, least=0) == 4 * (2 * 5 + 3 * 2)


def test_least_output_is_kept_free() -> None:
    lengths = lengths_of([1] * MOST_SEEN)
    found = [Footprint([1], 4, 400)]
    assert expected_peak(found, lengths, BLOCK, 0.0, least=0) == 1
    assert expected_peak(found, lengths, BLOCK, 0.0, least=16) >= 4


def test_rules() -> None:
    assert make_rule(SchedulerConfig(), BLOCK, in_step=True) is None
    assert isinstance(make_rule(SchedulerConfig(admission="exact"), BLOCK, in_step=True), Exact)
    rule = make_rule(SchedulerConfig(admission="predicted"), BLOCK, in_step=True)
    assert isinstance(rule, Predicted)
    found = [Footprint([], 4, 400)]
    assert rule.peak(found) == 101, "exact, as long as there are no answers"
    for _ in range(300):
        rule.ended(4, others_wait=False)
    assert rule.peak(found) < 10


def test_the_margin_follows_preemptions() -> None:
    rule = make_rule(SchedulerConfig(admission="predicted"), BLOCK, in_step=True)
    assert isinstance(rule, Predicted)
    found = [Footprint([place], 4, 400) for place in range(8)]
    for length in [4, 80] * 150:
        rule.ended(length, others_wait=False)
    before = rule.peak(found)
    rule.preempted()
    kept = rule.peak(found)
    assert kept > before + 1
    for length in [4, 80] * 4:
        rule.ended(length, others_wait=False)
    assert rule.peak(found) == pytest.approx(kept, abs=0.5), "answers that nobody waited for say nothing of it"
    for length in [4, 80] * 20:
        rule.ended(length, others_wait=True)
    assert rule.peak(found) < before + 0.5


@pytest.mark.parametrize("rate", [0.02, 0.05, 0.2])
def test_requests_are_preempted_as_often_as_they_may_be(rate: float) -> None:
    """Where the margin alone decides who is preempted: too small a one preempts."""
    rng, margin = random.Random(3), SafetyMargin(rate)
    preempted = 0
    for answer in range(6000):
        if rng.gauss(0, 1) > margin.deviations:
            margin.preempted()
            preempted += answer >= 1000
        margin.answered()
    assert preempted / 5000 == pytest.approx(rate, rel=0.15)
