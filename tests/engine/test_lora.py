"""Adapters (LoRA) of requests: tokens of models with the adapters' products merged into their weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.engine.adapters import ALL_LINEAR, EMBEDDINGS, make_adapter, merge_adapter, request_of
from tests.engine.lora_requests import ask
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine
from tests.engine.tiny_models import VOCAB, make_config, make_model

pytestmark = pytest.mark.slow  # starts engines

RNG = random.Random(41)
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(count)] for count in (1, 15, 16, 33, 70)]
MAX_TOKENS = 12
OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "max_lora_rank": 8,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
BUCKETS = {"graphs": {"mode": "eager", "recipe_check": "fail", "max_graphs": 14, "warm_up": "full"}}


class Family:
    """A tiny model, its adapters, and what Hugging Face computes with each of them merged; None for the model alone."""

    def __init__(self, folder: Path, model_type: str, modules: Sequence[str] = (*ALL_LINEAR, *EMBEDDINGS)) -> None:
        self.model = make_model(folder / "model", make_config(model_type))
        every, some = tuple(modules), tuple(name for name in modules if name not in EMBEDDINGS)
        self.adapters = [
            make_adapter(folder / "every", self.model, rank=4, modules=every, seed=1),
            make_adapter(folder / "few", self.model, rank=8, alpha=4.0, modules=some[:3], seed=2),
            make_adapter(folder / "third", self.model, rank=1, alpha=2.0, modules=some, seed=3),
        ]
        self.requests: list[LoRARequest | None] = [
            None,
            *(request_of(adapter, number) for number, adapter in enumerate(self.adapters, 1)),
        ]
        self.references = [ReferenceModel(self.model)]
        for adapter in self.adapters:
            self.references.append(
                ReferenceModel(merge_adapter(folder / f"merged {adapter.name}", self.model, adapter))
            )

    def ask(
        self, engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS, max_tokens: int = MAX_TOKENS
    ) -> list[Answer]:
        """Every prompt with every adapter and with none, all at once; checks the tokens."""
        asked = [(prompt, number) for prompt in prompts for number in range(len(self.requests))]
        answers = ask(engine, [(prompt, self.requests[number]) for prompt, number in asked], max_tokens)
        for number, reference in enumerate(self.references):
            mine = [answer for answer, (_, other) in zip(answers, asked, strict=True) if other == number]
            reference.assert_greedy(prompts, mine)
        # an adapter that made no difference would not be noticed if it were left out
        last = answers[-len(self.requests) :]
        assert len({tuple(answer.tokens) for answer in last}) == len(self.requests)
        return answers


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
