"""Runs of ids: which are taken, and that they agree with a set."""

from __future__ import annotations

import random

from vllm_gaudi_ucm.block_policies.id_runs import IdRuns


def test_the_run_that_goes_on_comes_first_and_then_the_shortest_that_holds_all() -> None:
    runs = IdRuns([1, 2, 5, 6, 7, 10, 11, 12, 13])
    assert runs.take(2, after=9, expected=3) == [10, 11]
    assert runs.take(1, after=0, expected=1) == [1]
    assert runs.take(2, after=-1, expected=3) == [5, 6]
    assert runs.take(9, after=-1, expected=9) == [2, 7, 12, 13]


def test_runs_agree_with_a_set() -> None:
    rng, runs, held = random.Random(1), IdRuns(), set[int]()
    for _ in range(2000):
        new = rng.sample(sorted(set(range(60)) - held), k=rng.randint(0, min(6, 60 - len(held))))
        runs.add(new)
        held |= set(new)
        taken = runs.take(rng.randint(0, 8), rng.randint(-1, 60), rng.randint(0, 12))
        assert set(taken) <= held
        held -= set(taken)
        assert list(runs) == sorted(held)
        assert len(runs) == len(held)
