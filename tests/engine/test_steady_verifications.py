"""Steps with drafts that are planned by the previous one have the plans, and tokens, of steps that are planned anew."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.batch.steady_plan import assert_same
from tests.engine.async_drafts import drafted_by
from tests.engine.async_traffic import STATIC, start
from tests.speculation.spoiled_proposer import SpoiledProposer
from vllm_gaudi_ucm.batch import batch_plan as planning
from vllm_gaudi_ucm.batch.batch_plan import SteadyPlanner, plan_batch
from vllm_gaudi_ucm.batch.steady_rows import SteadyRows
from vllm_gaudi_ucm.sparse.selection.steady_choices import SteadyChoices

pytestmark = pytest.mark.slow  # starts engines

SPARSE = {"sparse_ratio": 0.3, "sparse_steps": "always", "min_tokens": 40, "local_window_sz": 1, "init_window_sz": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense in buckets": STATIC,
    "GSA": {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": SPARSE}},
    "KVStar": {"ucm_sparse_method": "KVStar", "ucm_sparse_config": {"KVStar": SPARSE}},
    "KVStar in buckets": {"ucm_sparse_method": "KVStar", "ucm_sparse_config": {"KVStar": SPARSE}, **STATIC},
}
NEW_TOKENS = 60
"""More than three blocks of 16."""
PROMPTS = [[7 + index, *range(20, 20 + length)] for index, length in enumerate((50, 65, 41))]
PROMPTS += [[*range(30, 110), 5 * index] for index in range(3)]
"""The last three share five blocks."""


@contextmanager
def planned_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(SteadyRows, "advance", lambda *step: None)
        patch.setattr(SteadyChoices, "go_on", lambda *step: None)
        yield


@contextmanager
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Compares each plan with one that is made anew; yields whether `plan_batch` was called for each."""
    plan, anew, calls = SteadyPlanner.plan, list[bool](), list[object]()

    def counted(*step: Any) -> Any:
        calls.append(None)
        return plan_batch(*step)

    def compared(self: SteadyPlanner, batch: Any, selection: Any = None) -> Any:
        before = len(calls)
        found = plan(self, batch, selection)
        anew.append(len(calls) > before)
        assert_same(found, plan_batch(batch, self._block_size, self._causal_slice, selection, self._window))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(planning, "plan_batch", counted)
        patch.setattr(SteadyPlanner, "plan", compared)
        yield anew


@pytest.mark.parametrize("kind", OPTIONS)
def test_tokens_and_plans_are_those_of_steps_planned_anew(
    tiny_text_model: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Drafts are right or wrong, blocks begin at any row, and prompts are in the prefix cache the second
    time. covers: A1 A3 A7 C17
    """
    drafts = drafted_by(tiny_text_model)
    with start(tiny_text_model, OPTIONS[kind], is_async=True, speculative_config=drafts) as engine:

        def answers(texts: dict[tuple[int, ...], list[int]] | None) -> list[list[int]]:
            """texts: None for drafts of the draft model."""
            spoiled = SpoiledProposer(texts or {}, random.Random(4))
            engine.runner.parts.drafts.proposer = by_model if texts is None else spoiled
            found = engine.greedy(PROMPTS, NEW_TOKENS)
            cached.append(min(one.cached_tokens for one in found))
            return [one.tokens for one in found]

        by_model, cached = engine.runner.parts.drafts.proposer, list[int]()
        with planned_anew(monkeypatch):
            texts = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, answers({}), strict=True)}
            expected = answers(texts)
        with checked(monkeypatch) as anew:
            assert answers(texts) == expected
        assert sum(anew) < 0.7 * len(anew)
        with planned_anew(monkeypatch):
            answers(None)
            expected = answers(None)
        with checked(monkeypatch):
            assert answers(None) == expected
        assert min(cached[1:]) > 30
        engine.check_idle()
