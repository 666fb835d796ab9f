"""The demo model gives the tokens and logprobs of Transformers: long prompts, in buckets, and on three workers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import NEAR_TIE, Answer, Engine, assert_same
from tests.engine.static_shapes import shapes, static
from tests.engine.tensor_parallel import CHECKED
from tests.engine.texts import SHORT, story

pytestmark = pytest.mark.slow  # starts engines

MAX_TOKENS = 32
# of answers that are compared with those of the first batch
FEWER = 12


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> ReferenceModel:
    return ReferenceModel(smollm2)


@pytest.fixture(scope="module")
def prompts(smol_engine: Engine) -> list[list[int]]:
    """Twenty short ones, one beyond 2000 tokens, and one that is longer than a step beside it."""
    tokenizer = smol_engine.llm.get_tokenizer()
    texts = [*SHORT, story(210, 1), story(60, 2)]
    found = [tokenizer.encode(text) for text in texts]
    assert len(found[20]) > 2000
    assert len(found[21]) > 512
    return found


@pytest.fixture(scope="module")
def answers(smol_engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    found = smol_engine.greedy(prompts, MAX_TOKENS)
    smol_engine.check_idle()
    return found


@pytest.mark.slow
def test_greedy_tokens_and_logprobs(prompts: list[list[int]], answers: list[Answer], reference: ReferenceModel) -> None:
    """22 prompts x 32 tokens in one batch of chunks and decodes. covers: A1 A4 A5 A19"""
    assert all(len(answer.tokens) == MAX_TOKENS for answer in answers)
    reference.assert_greedy(prompts, answers)


def test_transformers_own_loop_agrees(
    prompts: list[list[int]], answers: list[Answer], reference: ReferenceModel
) -> None:
    for index in (0, 9):
        assert reference.generate(prompts[index], MAX_TOKENS) == answers[index].tokens


def test_alone_and_again_with_prefix_hits(smol_engine: Engine, prompts: list[list[int]], answers: list[Answer]) -> None:
    """covers: A3 A19"""
    chosen = [2, 6, 14, 20, 21]
    again = smol_engine.alone([prompts[i] for i in chosen], FEWER)
    assert_same(again, [answers[i].first(FEWER) for i in chosen])
    assert [answer.cached_tokens for answer in again] == [(len(prompts[i]) - 1) // 32 * 32 for i in chosen]


def test_arrivals_in_another_order(smol_engine: Engine, prompts: list[list[int]], answers: list[Answer]) -> None:
    order = list(range(12))
    random.Random(1).shuffle(order)
    found = smol_engine.staggered([prompts[i] for i in order], [2 * i for i in range(len(order))], FEWER)
    assert_same(found, [answers[i].first(FEWER) for i in order])
    smol_engine.check_idle()


def test_prompt_logprobs_of_a_prompt_in_several_chunks(
    smol_engine: Engine, prompts: list[list[int]], reference: ReferenceModel
) -> None:
    tokens = prompts[20][:600]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3)
    others = SamplingParams(temperature=0.0, max_tokens=10)
    output, *_ = smol_engine.generate([tokens, *prompts[:4]], [params, *[others] * 4])
    expected = reference.logprobs(tokens, len(tokens))
    found = output.prompt_logprobs
    assert found is not None
    assert len(found) == len(tokens)
    assert found[0] is None
    scored = torch.tensor([entry[token].logprob for entry, token in zip(found[1:], tokens[1:], strict=True) if entry])
    wanted = expected[torch.arange(len(tokens) - 1), tokens[1:]]
    torch.testing.assert_close(scored, wanted, atol=NEAR_TIE, rtol=0)
    best = torch.tensor([max(value.logprob for value in entry.values()) for entry in found[1:] if entry])
    torch.testing.assert_close(best, expected[:-1].max(dim=-1).values, atol=NEAR_TIE, rtol=0)


def test_top_logprobs_and_ranks(smol_engine: Engine, prompts: list[list[int]], reference: ReferenceModel) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=20)
    (output,) = smol_engine.generate([prompts[0]], params)
    completion = output.outputs[0]
    expected = reference.logprobs([*prompts[0], *completion.token_ids[:-1]], 3)
    assert completion.logprobs is not None
    for row, found in zip(expected, completion.logprobs, strict=True):
        assert len(found) == 20
        values = torch.tensor([entry.logprob for entry in found.values()])
        torch.testing.assert_close(values, row[list(found)], atol=NEAR_TIE, rtol=0)
        assert sorted(entry.rank for entry in found.values()) == list(range(1, 21))


def test_real_text_on_three_workers(
    smollm2: Path, smol_engine: Engine, prompts: list[list[int]], answers: list[Answer]
) -> None:
    """The demo model has 9 heads and 3 KV heads; with a grammar, and with its own self as the draft model."""
    chosen = [0, 2]
    asked = [prompts[index] for index in chosen]
    numbers = SamplingParams(
        temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex=r"[0-9]{3}-[0-9]{4}")
    )
    expected = [output.outputs[0].text for output in smol_engine.generate(asked, numbers)]
    options: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
        "speculative_config": {"method": "draft_model", "model": str(smollm2), "num_speculative_tokens": 2},
    }
    with Engine(smollm2, CHECKED, tensor_parallel_size=3, **options) as engine:
        assert_same(engine.greedy(asked, 16), [answers[index].first(16) for index in chosen])
        assert [output.outputs[0].text for output in engine.generate(asked, numbers)] == expected


def test_in_buckets(smollm2: Path, smol_engine: Engine) -> None:
    """With the skeleton alone. covers: B1 B6"""
    asked = [*SHORT[:3], story(9, 1)]
    wanted = smol_engine.greedy(asked, 6)
    options = {"skip_tokenizer_init": False, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    memory = {"block_size": 32, "kv_cache_memory_bytes": 64 << 20}
    with Engine(smollm2, static("skeleton", max_graphs=8, skeleton=2), **options, **memory) as engine:
        assert_same(engine.greedy(asked, 6), wanted)
        assert shapes(engine).stages.new_recipes == 0
