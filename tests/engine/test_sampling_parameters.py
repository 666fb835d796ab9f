"""Every sampling parameter has its effect, in a batch with requests that do not use it.

The model is tiny and random, its vocabulary and tokenizer are the demo model's: parameters speak of text too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from tests.engine.contracts import CONTRACTS, runner_contract
from tests.engine.serving import Engine
from tests.engine.texts import SHORT

PROMPT = SHORT[0]


@pytest.fixture(scope="module", params=CONTRACTS)
def text_engine(tiny_text_model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    options: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "max_logprobs": 20,
        "max_num_batched_tokens": 64,
        # a random model would fill its JSON with white space until its tokens are used up
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    with runner_contract(request.param), Engine(tiny_text_model, **options) as engine:
        yield engine


def sampled(engine: Engine, prompts: list[str], params: list[SamplingParams]) -> list[list[int]]:
    outputs = engine.generate(prompts, params)
    engine.check_idle()
    return [list(output.outputs[0].token_ids) for output in outputs]


def one(engine: Engine, **options: Any) -> Any:
    """The completion of PROMPT, in a batch with a greedy and a random request."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **options})
    others = [SamplingParams(temperature=t, max_tokens=8) for t in (0.0, 1.0)]
    output, *_ = engine.generate([PROMPT, *SHORT[1:3]], [params, *others])
    return output.outputs[0]


def test_seeds_do_not_depend_on_the_batch(text_engine: Engine) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=16, ignore_eos=True) for seed in range(6)]
    together = sampled(text_engine, [PROMPT] * 6, params)
    alone = [sampled(text_engine, [PROMPT], [entry])[0] for entry in params[:3]]
    assert together[:3] == alone
    assert len({tuple(tokens) for tokens in together}) > 3
    assert sampled(text_engine, [PROMPT] * 6, params[::-1])[::-1] == together


def test_parallel_sampling(text_engine: Engine) -> None:
    """n > 1: different samples of one prompt, each reproducible."""
    params = SamplingParams(n=5, temperature=1.0, seed=4, max_tokens=12, ignore_eos=True)
    first, second = (text_engine.generate([PROMPT], params)[0].outputs for _ in range(2))
    tokens = [tuple(sample.token_ids) for sample in first]
    assert len(tokens) == 5
    assert len(set(tokens)) > 2
    assert tokens == [tuple(sample.token_ids) for sample in second]
    text_engine.check_idle()


def test_beam_search_is_at_least_as_likely_as_greedy(text_engine: Engine) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    prompts: Any = [{"prompt": PROMPT}, {"prompt": SHORT[9]}]
    beams = text_engine.llm.beam_search(prompts, params)
    text_engine.check_idle()
    greedy = text_engine.greedy([PROMPT, SHORT[9]], 6)
    for found, wanted in zip(beams, greedy, strict=True):
        scores = [beam.cum_logprob for beam in found.sequences]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
        assert scores[0] >= sum(wanted.logprobs) - 1e-3


def test_stop_string(text_engine: Engine) -> None:
    plain = one(text_engine)
    stop = plain.text.split()[2]
    stopped = one(text_engine, stop=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == stop
    assert stopped.text == plain.text[: plain.text.index(stop)]


def test_stop_token_and_minimum_length(text_engine: Engine) -> None:
    plain = one(text_engine)
    stop = plain.token_ids[2]
    assert list(one(text_engine, stop_token_ids=[stop]).token_ids) == list(plain.token_ids[:3])
    later = one(text_engine, stop_token_ids=[stop], min_tokens=8)
    assert stop not in later.token_ids[:8]
    assert len(later.token_ids) >= 8


def test_logit_bias_and_bad_words_and_allowed_tokens(text_engine: Engine) -> None:
    plain = one(text_engine)
    first = plain.token_ids[0]
    assert one(text_engine, logit_bias={first: -100.0}).token_ids[0] != first
    assert set(one(text_engine, logit_bias={777: 100.0}).token_ids) == {777}
    assert set(one(text_engine, allowed_token_ids=[50, 60, 70]).token_ids) <= {50, 60, 70}
    tokenizer = text_engine.llm.get_tokenizer()
    for word in (tokenizer.decode([token]).strip() for token in plain.token_ids):
        tokens = [tokenizer.encode(spelt, add_special_tokens=False) for spelt in (word, f" {word}")]
        if [len(found) for found in tokens] == [1, 1]:
            break
    else:
        raise AssertionError("no word of the answer is one token, with and without a space")
    assert not {token for found in tokens for token in found} & {*one(text_engine, bad_words=[word]).token_ids}


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-3}], ids=lambda o: next(iter(o))
)
def test_a_cut_down_to_one_token_is_greedy(text_engine: Engine, options: dict[str, Any]) -> None:
    plain = one(text_engine, ignore_eos=True)
    cut = one(text_engine, ignore_eos=True, **{"temperature": 1.5, "seed": 3, **options})
    assert list(cut.token_ids) == list(plain.token_ids)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}], ids=lambda o: next(iter(o)))
def test_a_cut_keeps_tokens_that_belong(text_engine: Engine, options: dict[str, Any]) -> None:
    """Every sampled token is inside the set that the parameter leaves, as its own logprobs say."""
    params = SamplingParams(n=8, temperature=1.0, seed=9, max_tokens=6, logprobs=20, ignore_eos=True, **options)
    (output,) = text_engine.generate([PROMPT], params)
    for sample in output.outputs:
        assert sample.logprobs is not None
        for token, found in zip(sample.token_ids, sample.logprobs, strict=True):
            assert found is not None
            ranked = sorted((entry.logprob for entry in found.values()), reverse=True)
            probability = torch.tensor(found[token].logprob).exp()
            before = torch.tensor([value for value in ranked if value > found[token].logprob]).exp().sum()
            if "top_k" in options:
                assert found[token].rank in (1, 2, 3)
            elif "top_p" in options:
                assert before < 0.4 + 1e-5
            else:
                assert probability >= 0.3 * torch.tensor(ranked[0]).exp() - 1e-6


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_stop_repetition(text_engine: Engine, name: str) -> None:
    """covers: A6"""
    value = 10.0 if name == "repetition_penalty" else 2.0
    bias = dict.fromkeys(range(1000, 1000 + 40), 30.0)
    plain = one(text_engine, logit_bias=bias, max_tokens=30, ignore_eos=True)
    penalised = one(text_engine, logit_bias=bias, max_tokens=30, ignore_eos=True, **{name: value})
    assert len(set(penalised.token_ids)) > len(set(plain.token_ids))


def test_structured_outputs_of_every_kind_beside_free_requests(text_engine: Engine) -> None:
    """covers: A18"""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    grammar = 'root ::= "SELECT " column " FROM t"\ncolumn ::= "a" | "b"'
    wanted = [
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(regex=r"[A-Z]{3}-\d{4}"),
        StructuredOutputsParams(choice=["positive", "negative"]),
        StructuredOutputsParams(grammar=grammar),
    ]
    free = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    alone = [list(text_engine.generate([prompt], free)[0].outputs[0].token_ids) for prompt in SHORT[4:7]]
    prompts, params = [], []
    for temperature in (0.0, 1.0):
        for structured in wanted:
            prompts.append(PROMPT)
            params.append(SamplingParams(temperature=temperature, max_tokens=80, structured_outputs=structured))
    # free requests between and after the structured ones
    prompts[3:3], params[3:3] = [SHORT[4]], [free]
    outputs = text_engine.generate([*prompts, *SHORT[5:7]], [*params, free, free])
    text_engine.check_idle()
    assert [list(outputs[i].outputs[0].token_ids) for i in (3, -2, -1)] == alone
    texts = [outputs[i].outputs[0].text for i in (*range(3), *range(4, 9))]
    for text in (texts[0], texts[4]):
        found = json.loads(text)
        assert isinstance(found["name"], str)
        assert isinstance(found["age"], int)
    assert all(re.fullmatch(r"[A-Z]{3}-\d{4}", text) for text in (texts[1], texts[5]))
    assert {texts[2], texts[6]} <= {"positive", "negative"}
    assert {texts[3], texts[7]} <= {"SELECT a FROM t", "SELECT b FROM t"}


@pytest.mark.parametrize("name", ["prompt_logprob_token_ids", "thinking_token_budget"])
def test_a_refused_parameter_stops_only_its_request(text_engine: Engine, name: str) -> None:
    """covers: A18"""
    value: Any = np.zeros((6, 1), np.int64) if name == "prompt_logprob_token_ids" else 5
    engine = text_engine.llm.llm_engine
    running = text_engine.new_id()
    text_engine.add(running, [5, 6, 7, 8, 9, 10, 11], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    text_engine.step()
    with pytest.raises((ValueError, VLLMValidationError), match=name):
        text_engine.add(text_engine.new_id(), list(range(5, 12)), SamplingParams(max_tokens=5, **{name: value}))
    finished = []
    while engine.has_unfinished_requests():
        finished += [output for output in text_engine.step() if output.finished]
    assert [output.request_id.split("-", 2)[:2] for output in finished] == [running.split("-")]
    assert len(finished[0].outputs[0].token_ids) == 5
    text_engine.check_idle()
