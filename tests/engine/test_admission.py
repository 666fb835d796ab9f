"""`ucm.scheduler.admission`: with `exact` nothing is preempted, and no answer changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.admission import COMMON, LENGTHS, PROMPTS, SMALL, serve
from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError


def admission(rule: str) -> dict[str, Any]:
    return {"scheduler": {"admission": rule}}


@pytest.fixture(scope="module")
def wanted(tiny_llama: Path) -> Iterator[dict[str, list[int]]]:
    """With room for all."""
    with Engine(tiny_llama, max_model_len=256) as engine:
        answers = [engine.greedy([prompt], length)[0] for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
        yield {f"r{index}": answer.tokens for index, answer in enumerate(answers)}


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_exact_never_preempts(tiny_llama: Path, wanted: dict[str, list[int]], caching: bool) -> None:
    params = [greedy_params(length) for length in LENGTHS]
    preemptions = {}
    for rule in ("greedy", "exact"):
        with Engine(tiny_llama, admission(rule), **SMALL, enable_prefix_caching=caching) as engine:
            assert serve(engine, params) == wanted
            for _ in range(3):
                engine.step()
            engine.check_idle()
            preemptions[rule] = engine.preemptions
            if rule == "exact":
                assert engine.core.scheduler.block_policies.totals.admission_waits
    assert preemptions["greedy"] > 0, "else there is nothing to avoid"
    assert preemptions["exact"] == 0


def test_a_common_prefix_counts_once(tiny_llama: Path) -> None:
    """Four prompts of 64 common tokens fit beside each other where four others do not."""
    params = greedy_params(30)
    together = {}
    for name, prompts in (
        ("common", [[*COMMON, 5 + index] for index in range(4)]),
        ("own", [[7 + index, *COMMON] for index in range(4)]),
    ):
        options = {**SMALL, "num_gpu_blocks_override": 4 + 4 * 3 + 1}
        with Engine(tiny_llama, admission("exact"), **options) as engine:
            engine.greedy([[*COMMON, 4]], 1)  # stays in the prefix cache
            for index, prompt in enumerate(prompts):
                engine.add(f"{name}{index}", prompt, params)
            together[name] = most = 0
            while engine.llm.llm_engine.has_unfinished_requests():
                engine.step()
                most = max(most, len(engine.core.scheduler.running))
            together[name] = most
            assert engine.preemptions == 0
    assert together == {"common": 4, "own": 2}


def test_drafts_do_not_run_in_step(tiny_llama: Path, wanted: dict[str, list[int]]) -> None:
    """Requests generate different numbers of tokens in a step, and no rows of drafts overflow the cache."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    params = [greedy_params(length) for length in LENGTHS]
    with Engine(tiny_llama, admission("exact"), **SMALL, speculative_config=drafts) as engine:
        assert serve(engine, params) == wanted
        assert engine.preemptions == 0


def test_refused_by_name(tiny_llama: Path) -> None:
    memory_mode = {"ucm_sparse_method": "GSA", "memory_mode": {"enabled": True}}
    with pytest.raises(ValueError, match=r"ucm\.scheduler\.admission: found 'exact', expected 'greedy'"):
        Engine(tiny_llama, {**admission("exact"), **memory_mode})
    own = "vllm.v1.core.sched.scheduler.Scheduler"
    with pytest.raises(UnsupportedFeatureError, match=r"ucm\.scheduler\.admission"):
        Engine(tiny_llama, admission("exact"), scheduler_cls=own)


def test_the_same_answers_at_static_shapes(tiny_llama: Path) -> None:
    answers: list[list[Answer]] = []
    for graphs in ({}, {"graphs": {"mode": "eager", "max_graphs": 12}}):
        with Engine(tiny_llama, {**admission("exact"), **graphs}, **SMALL) as engine:
            answers.append(engine.greedy(PROMPTS, 60))
            assert engine.preemptions == 0
    assert_same(*answers)
