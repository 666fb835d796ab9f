"""Drafts that are drawn from a distribution of their own: what is emitted, whatever they are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.chi_square import assert_distributed
from tests.sampling.sampling_twins import MAX_ROWS, VOCAB, engine_config
from tests.speculation.fake_step import CPU, World, random_logits
from vllm_gaudi_ucm.execution.graph_manager import uncompiled
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.sampling.draft_probabilities import DraftProbabilities
from vllm_gaudi_ucm.sampling.static_sampling import StaticSampler
from vllm_gaudi_ucm.speculation.draft_choice import RandomDrafts

NUM_DRAFTS = 2
PROMPT = [3, 1]


def draft_logits(tokens: list[int]) -> torch.Tensor:
    """A draft model that often, but not always, agrees with the model."""
    return 0.6 * random_logits(tokens) + 0.4 * random_logits([*tokens, 5])


def static_sampler() -> StaticSampler:
    return StaticSampler(engine_config(), CPU, MAX_ROWS, lambda _: nullcontext(), print, HostWork(), uncompiled)


class DraftWorld(World):
    """A world with random drafts. static: with the sampler of static shapes."""

    def __init__(self, static: bool = False, **options: Any) -> None:
        self.kept = DraftProbabilities(MAX_ROWS, NUM_DRAFTS, VOCAB, CPU)
        super().__init__(sampler=static_sampler() if static else None, kept=self.kept, **options)
        self.drafts = RandomDrafts(self.kept, MAX_ROWS)

    def draft(self) -> dict[str, list[int]]:
        """Draws drafts for all requests, in rows with two pads behind them."""
        requests = list(self.table.requests.values())
        self.batch.sync(requests)
        self.drafts.begin(requests)
        rows = np.array([request.row for request in requests])
        found: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for number in range(NUM_DRAFTS):
            texts = [r.prompt_token_ids + r.output_token_ids + found[r.request_id] for r in requests]
            logits = torch.stack([draft_logits(text) for text in texts])
            logits = torch.cat([logits, torch.full((2, VOCAB), torch.nan)])[:MAX_ROWS]
            chosen = self.drafts.choose(logits, rows, self.table.num_tokens[rows].astype(np.int64), number)
            for request, token in zip(requests, chosen.tolist(), strict=False):
                found[request.request_id].append(token)
        return found


def processed(tokens: list[int], temperature: float, top_k: int) -> torch.Tensor:
    logits = random_logits(tokens).double() / temperature
    least = logits.topk(top_k).values[-1]
    return logits.masked_fill(logits < least, -torch.inf).softmax(-1)


@pytest.mark.parametrize("static", [False, True], ids=["true_shapes", "static"])
def test_tokens_have_the_distribution_of_the_model(static: bool) -> None:
    """All of the first two tokens together, with top-k, which the draft model does not have; and of the third token,
    which follows two accepted drafts."""
    top_k, temperature, rounds = 3, 1.4, 150
    firsts = processed(PROMPT, temperature, top_k)
    joint, counts = torch.zeros(VOCAB, VOCAB), torch.zeros(VOCAB, VOCAB)
    for token in firsts.nonzero()[:, 0].tolist():
        joint[token] = firsts[token] * processed([*PROMPT, token], temperature, top_k)
    accepted = 0
    for number in range(rounds):
        world = DraftWorld(static, seed=number)
        for i in range(MAX_ROWS):
            world.add(f"request-{i}", PROMPT, SamplingParams(temperature=temperature, top_k=top_k))
        while any(len(request.output_token_ids) < 2 for request in world.table.requests.values()):
            _, sampled = world.step(world.draft())
            accepted += sum(len(tokens) - 1 for tokens in sampled.tokens)
        for request in world.table.requests.values():
            counts[request.output_token_ids[0], request.output_token_ids[1]] += 1
    assert accepted > rounds * MAX_ROWS // 4
    assert_distributed(counts.flatten(), joint.flatten())


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, seed=9, top_k=5),
    SamplingParams(temperature=1.3, seed=2, top_p=0.8),
    SamplingParams(temperature=1.0, seed=3, min_p=0.05),
    SamplingParams(temperature=0.8, seed=4, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(temperature=1.0, seed=7, min_tokens=9, stop_token_ids=list(range(0, VOCAB, 2))),
]


def outputs(static: bool) -> tuple[list[list[int]], int]:
    world, accepted = DraftWorld(static), 0
    for number, params in enumerate(PARAMS):
        world.add(f"request-{number}", [number, 4, 2], params)
    for _ in range(6):
        _, sampled = world.step(world.draft())
        accepted += sum(len(tokens) - 1 for tokens in sampled.tokens)
    return [request.output_token_ids for request in world.table.requests.values()], accepted


def test_both_samplers_and_every_run_give_the_same_tokens() -> None:
    """Requests of all kinds together; greedy ones get the tokens that they get without drafts."""
    found, accepted = outputs(static=False)
    assert found == outputs(static=False)[0] == outputs(static=True)[0]
    assert accepted > 6
    text = [0, 4, 2]
    for token in found[0]:
        assert token == int(random_logits(text).argmax())
        text.append(token)


@pytest.mark.parametrize("static", [False, True], ids=["true_shapes", "static"])
def test_a_draft_without_a_distribution_is_compared(static: bool) -> None:
    """The drafts of a request that was not in the step since: its tokens equal the ones without drafts."""
    params = SamplingParams(temperature=0.9, seed=11)
    plain = World()
    plain.add("a", PROMPT, params)
    for _ in range(12):
        plain.step({})
    expected = plain.table.requests["a"].output_token_ids
    world = DraftWorld(static)
    request = world.add("a", PROMPT, params)
    while len(request.output_token_ids) < 12:
        drafts = world.draft()
        world.drafts.begin([])
        world.step(drafts)
    assert request.output_token_ids[:12] == expected


def test_random_drafts_follow_the_temperature() -> None:
    """A request's drafts are the likeliest tokens at temperature 0, and have the draft model's distribution at 1."""
    counts = torch.zeros(VOCAB)
    for seed in range(150):
        world = DraftWorld(seed=seed)
        for i in range(MAX_ROWS - 1):
            world.add(f"request-{i}", PROMPT, SamplingParams(temperature=1.0))
        world.add("greedy", PROMPT, SamplingParams(temperature=0.0))
        drafts = world.draft()
        assert drafts.pop("greedy")[0] == int(draft_logits(PROMPT).argmax())
        for some in drafts.values():
            counts[some[0]] += 1
    assert_distributed(counts, draft_logits(PROMPT).softmax(-1))
