"""Slots of the sampler's batch change from step to step; what a request gets does not depend on it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.sampler import Sampler

from vllm_gaudi_ucm.batch.request_table import LiveRequest
from vllm_gaudi_ucm.sampling.sampling import SamplingBatch, VllmSampler

VOCAB = 32
CPU = torch.device("cpu")
PROMPT = [3, 5, 5, 7]


def sampling_batch(max_num_seqs: int = 16) -> SamplingBatch:
    """Only what the sampler's batch and vLLM's processors read of the configuration."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_vocab_size=lambda: VOCAB, logits_processors=None, is_diffusion=False, max_model_len=64, seed=0
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        speculative_config=None,
        reasoning_config=None,
        structured_outputs_config=SimpleNamespace(reasoning_parser=""),
    )
    return SamplingBatch(cast(VllmConfig, config), CPU)


def params_of(rng: random.Random) -> SamplingParams:
    """Any mix of what the sampler keeps per request; random requests have a seed, so that runs can be compared."""
    options: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "seed": rng.randrange(1000),
        "min_p": rng.choice([0.0, 0.2, 0.5]),
        "top_k": rng.choice([0, 1, 5, 100]),
        "top_p": rng.choice([1.0, 0.5]),
        "min_tokens": rng.choice([0, 0, 2, 4]),
        "logit_bias": rng.choice([None, {1: 8.0, 2: -100.0}, {4: 6.0}]),
        "presence_penalty": rng.choice([0.0, 1.5]),
        "frequency_penalty": rng.choice([0.0, -1.0]),
        "repetition_penalty": rng.choice([1.0, 1.8]),
        "allowed_token_ids": rng.choice([None, None, [1, 2, 3, 9, 30]]),
        "logprobs": rng.choice([None, 0, 3]),
    }
    params = SamplingParams(**options, stop_token_ids=[rng.randrange(VOCAB)], max_tokens=50)
    params._bad_words_token_ids = rng.choice([None, [[9]], [[5, 9], [1]]])
    params._all_stop_token_ids = set(params.stop_token_ids or ())
    if params.temperature == 0.0:
        params.seed = None
    return params


@dataclass
class Twin:
    """A request in the batch under test, and the same request in a batch of its own."""

    together: LiveRequest
    alone: LiveRequest
    batch: SamplingBatch = field(default_factory=lambda: sampling_batch(1))


def live(name: str, params: SamplingParams) -> LiveRequest:
    return LiveRequest(name, 0, list(PROMPT), params)


def sample(batch: SamplingBatch, logits: dict[str, torch.Tensor]) -> dict[str, tuple[int, list[float]]]:
    """One step of the sampler: token and logprobs per request, written back as the runner does."""
    rows = torch.stack([logits[request_id] for request_id in batch.req_ids])
    found = VllmSampler("raw_logprobs", False).sample(rows, batch, None)
    tokens = [token for (token,) in found.tokens]
    results = {}
    for slot, request in enumerate(batch.slots):
        wanted = request.sampling_params.logprobs
        scores: list[float] = []
        if wanted is not None:
            assert found.logprobs is not None
            scores = found.logprobs.logprobs[slot, : wanted + 1].tolist()
        results[request.request_id] = (tokens[slot], scores)
        request.output_token_ids.append(tokens[slot])
    return results


@settings(max_examples=25)
@given(st.integers(0, 1 << 30))
def test_a_request_samples_as_if_it_were_alone(seed: int) -> None:
    """Min-p, bias, minimum length, penalties, bad words, allowed tokens, seeds: all follow the request through
    every change of slots. covers: A6 D7
    """
    rng = random.Random(seed)
    batch = sampling_batch()
    weights = torch.Generator().manual_seed(rng.randrange(1 << 30))
    twins: dict[str, Twin] = {}
    for step in range(20):
        for name in [name for name in twins if rng.random() < 0.15]:
            del twins[name]
        while rng.random() < 0.5 and len(twins) < 8:
            params = params_of(rng)
            twins[f"{step}-{len(twins)}"] = Twin(live(f"{step}-{len(twins)}", params), live(f"{step}", params))
        wanted = [name for name in twins if rng.random() < 0.7]
        rng.shuffle(wanted)
        batch.sync([twins[name].together for name in wanted])
        assert sorted(batch.req_ids) == sorted(wanted)
        if not wanted:
            continue
        logits = {name: torch.randn(VOCAB, generator=weights) for name in wanted}
        results = sample(batch, logits)
        for name in wanted:
            twin = twins[name]
            twin.batch.sync([twin.alone])
            assert sample(twin.batch, {twin.alone.request_id: logits[name]}) == {
                twin.alone.request_id: (results[name][0], pytest.approx(results[name][1], abs=1e-6))
            }


def test_slots_stay_while_the_set_of_requests_does() -> None:
    batch = sampling_batch()
    requests = [live(name, SamplingParams()) for name in "abcd"]
    batch.sync(requests)
    metadata = batch.metadata
    batch.sync(requests[::-1])
    assert batch.slots == requests
    assert batch.metadata is metadata


def test_a_freed_slot_is_refilled_before_others_move() -> None:
    batch = sampling_batch()
    a, b, c, d, e, f = (live(name, SamplingParams()) for name in "abcdef")
    batch.sync([a, b, c, d])
    batch.sync([a, c, d, e])
    assert batch.req_ids == ["a", "e", "c", "d"]
    batch.sync([c, d])
    assert sorted(batch.req_ids) == ["c", "d"]
    batch.sync([])
    assert batch.req_ids == []
    batch.sync([f])
    assert batch.req_ids == ["f"]


def test_a_request_with_a_reused_id_starts_anew() -> None:
    """The same id is another request: its bias, its seed, its outputs. covers: D7"""
    batch = sampling_batch()
    old = live("a", SamplingParams(temperature=1.0, seed=1, logit_bias={1: 100.0}))
    batch.sync([old])
    logits = torch.zeros(VOCAB)
    assert sample(batch, {"a": logits})["a"][0] == 1
    new = live("a", SamplingParams(temperature=0.0, logit_bias={2: 100.0}))
    batch.sync([new])
    assert sample(batch, {"a": logits})["a"][0] == 2
    assert new.noise_seed is None
    assert new.output_token_ids == [2]


def test_a_seed_survives_steps_without_a_slot() -> None:
    """A preempted request goes on where it was; it does not start its seed again."""
    params = SamplingParams(temperature=1.0, seed=11)
    logits = torch.zeros(VOCAB)
    steady, leaving = sampling_batch(), sampling_batch()
    one, other, filler = live("a", params), live("a", params), live("b", SamplingParams(temperature=1.0))
    tokens = []
    for step in range(6):
        steady.sync([one])
        tokens.append(sample(steady, {"a": logits})["a"][0])
        if step % 2:
            leaving.sync([filler])
            sample(leaving, {"b": logits})
        leaving.sync([filler, other])
        assert sample(leaving, {"a": logits, "b": logits})["a"][0] == tokens[-1]
    assert len(set(tokens)) > 1


def test_requests_leave_the_global_generator_alone() -> None:
    """Those without a seed get one of the engine's, in the order in which they come: each worker draws the same."""
    torch.manual_seed(0)
    seeds = []
    for _ in range(2):
        batch = sampling_batch()
        batch.sync([live("a", SamplingParams(temperature=1.0)), live("b", SamplingParams(temperature=1.0))])
        sample(batch, {"a": torch.zeros(VOCAB), "b": torch.zeros(VOCAB)})
        seeds.append([request.noise_seed for request in batch.slots])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))


def test_penalties_see_the_outputs_of_the_steps_before() -> None:
    batch = sampling_batch()
    request = live("a", SamplingParams(temperature=0.0, presence_penalty=2.0))
    logits = torch.arange(VOCAB) * 0.5
    tokens = []
    for _ in range(4):
        batch.sync([request])
        tokens.append(sample(batch, {"a": logits})["a"][0])
    assert tokens == [31, 30, 29, 28]


def test_min_tokens_ends_with_its_count() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[31])
    params._all_stop_token_ids = {31}
    batch, request = sampling_batch(), live("a", params)
    tokens = []
    for _ in range(3):
        batch.sync([request])
        tokens.append(sample(batch, {"a": torch.arange(VOCAB) * 1.0})["a"][0])
    assert tokens == [30, 30, 31]


def test_all_logprobs_of_the_vocabulary() -> None:
    batch = sampling_batch()
    batch.sync([live("a", SamplingParams(temperature=0.0, logprobs=-1))])
    found = Sampler()(torch.randn(1, VOCAB), batch.vllm_metadata)
    assert found.logprobs_tensors is not None
    assert found.logprobs_tensors.logprobs.shape == (1, VOCAB + 1)
    assert found.logprobs_tensors.logprobs[0, 1:].exp().sum() == pytest.approx(1.0)
