"""The benchmark of accepted lengths: verification is what it is called, dense and under a shared, locked choice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.retrieval.batch import make_batch
from benchmarks.retrieval.data import Task
from benchmarks.retrieval.model import MODEL
from benchmarks.sparse_rows import load_causal
from benchmarks.sparse_same_drafts import ratio_of_sums
from benchmarks.sparse_shared_choice import SharedChoice
from benchmarks.sparse_step import Step
from benchmarks.sparse_verification import (
    Continuation,
    Rows,
    chances,
    dense_continuation,
    propose,
    rounded,
    tokens_of_step,
    verify,
)
from vllm_gaudi_ucm.sparse.methods.gsa import GsaOptions

BLOCK, DRAFTS, NEW = 16, 4, 24


@pytest.fixture(scope="module")
def model() -> Any:
    return load_causal(MODEL)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    task = Task(400, records=40, queries=2, answers=4)
    return [int(token) for token in make_batch(task, 1, np.random.default_rng(3)).tokens[0]]


@pytest.fixture(scope="module")
def done(model: Any, prompt: list[int]) -> Continuation:
    draft = Rows(rounded(model, 3), prompt)
    return dense_continuation(Rows(model, prompt), draft, prompt, NEW, DRAFTS, 0.0, 0)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


def options(ratio: float) -> GsaOptions:
    return GsaOptions(sparse_ratio=ratio, min_tokens=1)


def test_rows_do_not_depend_on_how_many_are_computed_at_once(model: Any, prompt: list[int]) -> None:
    rows, first = Rows(model, prompt[:-5]), len(prompt) - 6
    at_once = rows.logits(prompt[first:], first)
    single = [rows.logits(prompt[at : at + 1], at)[0] for at in range(first, len(prompt))]
    torch.testing.assert_close(torch.stack(single), at_once, rtol=1e-4, atol=1e-4)


def test_dense_verification_gives_greedy_tokens(model: Any, prompt: list[int], done: Continuation) -> None:
    assert done.tokens == greedy(model, prompt, len(done.tokens) - len(prompt))
    assert sum(step.accepted for step in done.verifications) == len(done.tokens) - len(prompt)
    assert done.verifications[0].certain == len(prompt)


def test_drafts_are_the_draft_models_greedy_tokens(model: Any, prompt: list[int]) -> None:
    """Also where it has computed tokens that were rejected since."""
    draft = Rows(model, prompt)
    expected = greedy(model, prompt, DRAFTS)
    assert propose(draft, prompt, DRAFTS) == expected[-DRAFTS:]
    other = [*prompt, *expected[-DRAFTS:][:2], 5]
    assert propose(draft, other, DRAFTS) == greedy(model, other, DRAFTS)[-DRAFTS:]


def test_the_model_as_its_own_draft_model_is_never_rejected(model: Any, prompt: list[int]) -> None:
    own = dense_continuation(Rows(model, prompt), Rows(model, prompt), prompt, NEW, DRAFTS, 0.0, 0)
    assert {step.accepted for step in own.verifications} == {1 + DRAFTS}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_budget_of_all_blocks_accepts_what_dense_verification_accepts(
    model: Any, prompt: list[int], temperature: float
) -> None:
    target = Rows(model, prompt)
    found = dense_continuation(target, Rows(rounded(model, 3), prompt), prompt, NEW, DRAFTS, temperature, 1)
    lengths = verify(target, found, SharedChoice(options(1.0), lock=2), BLOCK, temperature)
    assert lengths == pytest.approx([step.accepted for step in found.verifications], abs=1e-3)


def test_a_budget_without_the_records_accepts_less(model: Any, prompt: list[int]) -> None:
    """The model must see the record that it is asked for: its own drafts are rejected without it."""
    target = Rows(model, prompt)
    own = dense_continuation(target, Rows(model, prompt), prompt, NEW, DRAFTS, 0.8, 0)
    few = verify(target, own, SharedChoice(options(0.05)), BLOCK, 0.8)
    assert sum(few) < sum(step.accepted for step in own.verifications)


def a_step(layer: int, contexts: int, rows: int = 3) -> Step:
    generator = torch.Generator().manual_seed(layer)
    query, keys = torch.randn(rows, 4, 8, generator=generator), torch.randn(contexts, 2, 8, generator=generator)
    return Step(layer, query, keys, torch.arange(contexts - rows + 1, contexts + 1), 8**-0.5, BLOCK)


def test_rows_share_a_choice_of_the_budget() -> None:
    """covers: C12 C16"""
    attended = SharedChoice(options(0.5))(a_step(0, 20 * BLOCK + 5))
    assert attended is not None
    assert (attended == attended[:1]).all()
    # 10 of 20 full blocks, and the tail with the drafts
    assert attended[0].sum() == 11
    assert attended[0, [0, 18, 19, 20]].all()


def test_a_lock_keeps_choice_and_window_for_its_verifications() -> None:
    """covers: C12 C17"""
    choice = SharedChoice(options(0.5), lock=2)
    seen = [[choice(a_step(layer, context)) for layer in (0, 1)] for context in (330, 347, 364)]
    for layer in (0, 1):
        first, second, third = (step[layer] for step in seen)
        assert torch.equal(first[0, :20], second[0, :20])
        assert second[0, 18:].all(), "what was generated since is attended"
        assert third[0].sum() <= second[0].sum()


def test_expected_tokens() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [1.0, 0.0, 0.0]]) + 1e-9)
    assert chances(logits, [0, 2], 1.0).tolist() == pytest.approx([0.5, 0.3], abs=1e-4)
    assert tokens_of_step(chances(logits, [0, 2], 1.0)) == pytest.approx(1 + 0.5 + 0.15, abs=1e-4)
    assert tokens_of_step(chances(logits, [0, 2], 0.0)) == 2


def test_the_ratio_has_an_error_over_prompts() -> None:
    assert ratio_of_sums([[2.0, 2.0], [3.0]], [[2.0, 2.0], [4.0]]) == (7 / 8, pytest.approx(0.125))
    assert math.isnan(ratio_of_sums([[1.0]], [[2.0]])[1])
