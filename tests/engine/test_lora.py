"""Adapters (LoRA) of requests: tokens of models with the adapters' products merged into their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.lora_family import BUCKETS, OPTIONS, PROMPTS, Family
from tests.engine.serving import Engine

pytestmark = pytest.mark.slow  # starts engines


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_adapters_in_one_batch(llama: Family, ucm: dict[str, Any], asynchronous: bool) -> None:
    with Engine(llama.model, ucm, **OPTIONS, async_scheduling=asynchronous) as engine:
        llama.ask(engine)
        engine.step()
        engine.check_idle()


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
def test_preemption(llama: Family, ucm: dict[str, Any]) -> None:
    """More adapters than slots, and blocks of so few requests that others are preempted."""
    with Engine(llama.model, ucm, **{**OPTIONS, "num_gpu_blocks_override": 14}) as engine:
        llama.ask(engine, max_tokens=30)
        engine.step()
        engine.check_idle()
        assert engine.preemptions > 0


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_are_verified_with_adapters(llama: Family, ucm: dict[str, Any], method: str, tiny_llama: Path) -> None:
    """A draft model has no adapters, and is wrong more often with one."""
    draft = NGRAM if method == "ngram" else {"method": method, "model": str(tiny_llama), "num_speculative_tokens": 3}
    with Engine(llama.model, ucm, **OPTIONS, speculative_config=draft) as engine:
        llama.ask(engine)


def test_a_prefix_is_found_with_its_adapter_alone(llama: Family) -> None:
    prompt = PROMPTS[-1]
    with Engine(llama.model, {}, **OPTIONS) as engine:
        first = llama.ask(engine, [prompt])
        assert [answer.cached_tokens for answer in first] == [0] * len(llama.requests)
        again = llama.ask(engine, [prompt])
        assert [answer.cached_tokens for answer in again] == [64] * len(llama.requests)


def test_prompt_logprobs_are_of_the_adapter(llama: Family) -> None:
    """Rows in the middle of a prompt have logits of its adapter, too."""
    prompt = PROMPTS[3]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for ucm in ({}, BUCKETS):
        with Engine(llama.model, ucm, **OPTIONS) as engine:
            found = engine.llm.generate(
                [{"prompt_token_ids": prompt}] * 4, params, lora_request=llama.requests, use_tqdm=False
            )
        for output, reference in zip(found, llama.references, strict=True):
            expected = reference.logprobs(prompt, keep=len(prompt))
            assert output.prompt_logprobs is not None
            for place, scores in enumerate(output.prompt_logprobs[1:]):
                token = prompt[place + 1]
                assert scores is not None
                assert scores[token].logprob == pytest.approx(float(expected[place, token]), abs=1e-3)
