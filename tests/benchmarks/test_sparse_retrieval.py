"""The retrieval model: its sequences are what they say, training resumes exactly, and the trained weights look up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.retrieval import train as training
from benchmarks.retrieval.batch import accuracy, make_batch
from benchmarks.retrieval.curriculum import Stage, plan
from benchmarks.retrieval.data import Sequence, Task, make_sequence, spread_positions
from benchmarks.retrieval.model import load_model
from benchmarks.retrieval.vocabulary import FIRST_FILLER, FIRST_SYMBOL, QUERY, RECORD


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """Small ones that fit."""
    queries, answers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    records = queries * answers + draw(st.integers(0, 10))
    return Task(1 + records * 3 + queries * (answers + 2) + draw(st.integers(0, 40)), records, queries, answers)


def records_of(sequence: Sequence) -> dict[int, int]:
    """Keys and values, read from the tokens."""
    tokens = sequence.tokens.tolist()
    at = [place for place, token in enumerate(tokens) if token == RECORD]
    return {tokens[place + 1]: tokens[place + 2] for place in at}


@given(tasks(), st.integers(0, 2**32 - 1))
def test_answers_are_the_values_of_the_keys(task: Task, seed: int) -> None:
    sequence = make_sequence(task, np.random.default_rng(seed))
    records = records_of(sequence)
    assert len(sequence.tokens) == len(sequence.starts) == task.length
    assert len(records) == task.records
    assert len(sequence.rows) == task.queries * task.answers
    asked = sequence.tokens[sequence.rows].tolist()
    assert [records[key] for key in asked] == sequence.answers.tolist()
    assert len(set(asked)) == len(asked)
    assert int((sequence.tokens == QUERY).sum()) == task.queries


@given(tasks(), st.integers(0, 2**32 - 1), st.integers(0, 5000))
def test_gaps_are_between_segments_only(task: Task, seed: int, slack: int) -> None:
    rng = np.random.default_rng(seed)
    sequence = make_sequence(task, rng)
    steps = np.diff(spread_positions(sequence.starts, task.length + slack, rng))
    assert (steps >= 1).all()
    assert (steps[~sequence.starts[1:]] == 1).all()
    assert steps.sum() < task.length + slack
    symbols = (sequence.tokens >= FIRST_SYMBOL) & (sequence.tokens < FIRST_FILLER)
    assert not (symbols & sequence.starts).any()


@pytest.mark.parametrize("task", [(100, 40, 1, 1), (100, 10, 4, 4), (9000, 500, 1, 1), (100, 10, 0, 4)])
def test_a_task_that_does_not_fit_is_refused(task: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="needs at most 384 records"):
        Task(*task)


def test_sequences_come_from_the_seed() -> None:
    task = Task(64, 8, 2, 2)
    first, second, other = (make_batch(task, 2, np.random.default_rng(seed), 500) for seed in (1, 1, 2))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert not torch.equal(first.tokens, other.tokens)


def test_rates_fall_from_the_first_to_the_last() -> None:
    stage = Stage(Task(64, 8, 2, 2), sequences=1, steps=4, first_rate=1.0, last_rate=0.5)
    assert [rate for _, rate in plan((stage, stage))] == [1.0, 0.875, 0.75, 0.625] * 2


def test_interrupted_training_resumes_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(48, 6, 2, 2)
    whole = training.train(0, tmp_path / "whole.pt", (Stage(task, 2, 4, 1e-3, 1e-3),))

    steps = 0

    def interrupted(*args: object) -> tuple[float, float]:
        nonlocal steps
        if steps == 3:
            raise KeyboardInterrupt
        steps += 1
        return step(*args)  # type: ignore[arg-type]

    step = training.train_step
    monkeypatch.setattr(training, "SAVE_EVERY", 2)
    with monkeypatch.context() as patch:
        patch.setattr(training, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.train(0, tmp_path / "parts.pt", (Stage(task, 2, 4, 1e-3, 1e-3),))
    resumed = training.train(0, tmp_path / "parts.pt", (Stage(task, 2, 4, 1e-3, 1e-3),))
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_trained_model_looks_up() -> None:
    assert accuracy(load_model(), Task(1024, records=96, queries=8, answers=8), sequences=1, seed=3) >= 0.98
