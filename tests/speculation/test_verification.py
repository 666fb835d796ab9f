"""Whatever is proposed, a request gets the tokens that it gets without drafts."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams

from tests.sampling.sampling_twins import VOCAB
from tests.speculation.fake_step import World, random_logits, scheduled_drafts
from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts

GREEDY = SamplingParams(temperature=0.0)


def plain_tokens(prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    """Decoded one by one."""
    world = World()
    request = world.add("plain", prompt, params)
    for _ in range(count):
        world.step({})
    return request.output_token_ids


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("accepted", range(4))
def test_tokens_up_to_the_first_other_one(at_once: bool, accepted: int) -> None:
    """None, some or all drafts are accepted; the token after the last accepted one is sampled, too. covers: A6"""
    expected = plain_tokens([1, 2, 3], GREEDY, 4)
    drafts = list(expected[:3])
    if accepted < 3:
        drafts[accepted] = (drafts[accepted] + 1) % VOCAB
    world = World(at_once)
    request = world.add("a", [1, 2, 3], GREEDY)
    _, sampled = world.step({"a": drafts})
    assert sampled.tokens == [expected[: accepted + 1]]
    assert request.output_token_ids == expected[: accepted + 1]
    assert world.calls == ([4] if at_once else [1] * (accepted + 1))


@pytest.mark.parametrize("accepted", range(4))
def test_greedy_requests_alone_take_one_call(accepted: int) -> None:
    """And their slots stay as they are; one that wants more of the logits sends all of them the other way."""
    expected = plain_tokens([1, 2, 3], GREEDY, 4)
    drafts = list(expected[:3])
    if accepted < 3:
        drafts[accepted] = (drafts[accepted] + 1) % VOCAB
    world = World(likeliest=True)
    world.add("without", [9], GREEDY)
    request = world.add("a", [1, 2, 3], GREEDY)
    names, sampled = world.step({"a": drafts})
    assert dict(zip(names, sampled.tokens, strict=True))["a"] == expected[: accepted + 1]
    assert request.output_token_ids == expected[: accepted + 1]
    assert sampled.logprobs is None
    assert world.calls == [5]
    assert [slot.request_id for slot in world.batch.slots] == names
    for params in PARAMS[1:]:
        other = World(at_once=False, likeliest=True)
        other.add("a", [1, 2, 3], GREEDY)
        other.add("b", [1, 2, 3], params)
        other.step({"a": drafts})
        assert other.calls[0] == 2, params


PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, seed=9, top_k=5),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(temperature=0.0, repetition_penalty=1.7),
    SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=list(range(0, VOCAB, 2))),
    SamplingParams(temperature=0.0, bad_words=None, logprobs=2),
]


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_any_drafts_give_the_tokens_of_no_drafts(rng: random.Random, at_once: bool, all_greedy: bool) -> None:
    """Many requests side by side, drafts right for a random while: seeds, penalties and min_tokens go on exactly."""
    params_of = [GREEDY] if all_greedy else PARAMS
    chosen = [(f"request-{i}", [rng.randrange(VOCAB) for _ in range(3)], rng.choice(params_of)) for i in range(4)]
    expected = {name: plain_tokens(prompt, params, 24) for name, prompt, params in chosen}
    world = World(at_once, likeliest=True)
    for name, prompt, params in chosen:
        world.add(name, prompt, params)
    for _ in range(4):
        drafts = {}
        for name, request in world.table.requests.items():
            known = len(request.output_token_ids)
            drafts[name] = expected[name][known : known + rng.randrange(5)]
            if drafts[name] and rng.random() < 0.6:
                place = rng.randrange(len(drafts[name]))
                drafts[name][place] = rng.randrange(VOCAB)
        before = {name: len(request.output_token_ids) for name, request in world.table.requests.items()}
        names, sampled = world.step(drafts)
        for name, tokens in zip(names, sampled.tokens, strict=True):
            assert tokens == expected[name][before[name] : before[name] + len(tokens)]
            assert world.table.requests[name].output_token_ids[before[name] :] == tokens


def test_logprobs_follow_their_tokens() -> None:
    """Of several tokens per request, at widths that differ from position to position."""
    wide, narrow = SamplingParams(temperature=0.0, logprobs=4), SamplingParams(temperature=0.0, logprobs=1)
    expected = plain_tokens([4, 4], narrow, 3)
    world = World()
    world.add("wide", [1, 2, 3], wide)
    world.add("narrow", [4, 4], narrow)
    world.add("silent", [9], GREEDY)
    names, sampled = world.step({"narrow": expected[:2], "silent": [VOCAB - 1]})
    found = sampled.logprobs
    assert found is not None
    assert found.logprob_token_ids.shape == (sum(map(len, sampled.tokens)), 5)
    for index, name in enumerate(names):
        part = found.slice_request(index, len(sampled.tokens[index]))
        assert part.logprob_token_ids[:, 0].tolist() == sampled.tokens[index]
        tokens = world.table.requests[name].prompt_token_ids + sampled.tokens[index]
        if name == "narrow":
            assert tokens == [4, 4, *expected]
            assert np.isneginf(part.logprobs[1:, 2:]).all()
            assert np.isfinite(part.logprobs[:, :2]).all()
            assert part.sampled_token_ranks.tolist() == [1, 1, 1]


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_logprobs_are_there_for_every_request_of_a_step(chunks: int) -> None:
    """vLLM asks for those of requests in the middle of their prompts, too, which stand behind the others."""
    params = SamplingParams(temperature=0.0, logprobs=1)
    expected = plain_tokens([1, 2, 3], params, 3)
    world = World()
    world.add("a", [1, 2, 3], params)
    world.add("b", [4, 4], GREEDY)
    _, sampled = world.step({"a": expected[:2]}, chunks=chunks)
    found, tokens = sampled.logprobs, sampled.tokens + [[]] * chunks
    assert sorted(map(len, sampled.tokens)) == [1, 3]
    assert found is not None
    for index, own in enumerate(tokens):
        part = found.slice_request(index, len(own))
        assert part.logprob_token_ids[:, :1].tolist() == [[token] for token in own]


def test_drafts_of_minus_one_have_no_rows() -> None:
    """The scheduler pads new decodes with them."""
    output = scheduled_drafts({"a": [-1, -1], "b": [4, -1], "c": [5, 6]}, {"a": 3, "b": 3, "c": 3, "d": 7})
    drafts = StepDrafts.from_scheduler_output(output)
    assert drafts.tokens == {"b": [4], "c": [5, 6]}
    assert drafts.num_scheduled == {"a": 1, "b": 2, "c": 3, "d": 7}
    assert output.num_scheduled_tokens == {"a": 3, "b": 3, "c": 3, "d": 7}
    assert [drafts.count(name) for name in "abcd"] == [0, 1, 2, 0]


def test_unseeded_sampling_with_drafts_keeps_the_distribution() -> None:
    """Many first and second tokens at temperature 1 with a draft of the likeliest token, against the softmax."""
    torch.manual_seed(3)
    prompt = [3, 1]
    first = torch.softmax(random_logits(prompt), -1)
    draft = int(first.argmax())
    second = torch.softmax(random_logits([*prompt, draft]), -1)
    counts = torch.zeros(2, VOCAB)
    rounds = 800
    for round_ in range(rounds // 8):
        world = World(seed=round_)
        for i in range(8):
            world.add(f"request-{i}", prompt, SamplingParams(temperature=1.0))
        _, sampled = world.step({name: [draft] for name in world.table.requests})
        for tokens in sampled.tokens:
            assert len(tokens) == 1 + (tokens[0] == draft)
            counts[0, tokens[0]] += 1
            if len(tokens) == 2:
                counts[1, tokens[1]] += 1
    accepted = int(counts[0, draft])
    for found, expected, total in ((counts[0], first, rounds), (counts[1], second, accepted)):
        bound = 5 * (expected * (1 - expected) / total).sqrt() + 1 / total
        assert ((found / total - expected).abs() <= bound).all()
