"""What only the host does is done for the rows that ask for it; the others stay on the device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from tests.sampling.sampling_twins import (
    MAX_ROWS,
    MODES,
    VOCAB,
    WIDTH,
    Twins,
    assert_same,
    engine_config,
    poisoned_logits,
    random_grammar,
)
from vllm_gaudi_ucm.sampling.stages import logit_bias


class Favourite(AdapterLogitsProcessor):
    """A user's own, of requests that name a token: it is as likely as all others, and never twice in a row."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        token = (params.extra_args or {}).get("favourite")
        if token is None:
            return None

        def prefer(outputs: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[token] = -torch.inf if outputs[-1:] == [token] else logits.logsumexp(0)
            return logits

        return prefer


class Late(Favourite):
    """Behind the temperature, where the device is in the middle."""

    def is_argmax_invariant(self) -> bool:
        return True


def asks_for(name: str) -> SamplingParams:
    options: dict[str, dict[str, Any]] = {
        "custom logits processors": {"extra_args": {"favourite": 9}},
        "more than 3 logit_bias": {"logit_bias": {4: 9.0, 5: -100.0, 60: 2.0, 69: 1.0}},
        "logprob_token_ids": {"logprob_token_ids": [5, 69, 5]},
        f"more than {WIDTH} logprobs": {"logprobs": WIDTH + 2},
    }
    return SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.3, max_tokens=20, **options[name])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name",
    ["custom logits processors", "more than 3 logit_bias", "logprob_token_ids", f"more than {WIDTH} logprobs"],
)
def test_one_row_crosses(monkeypatch: pytest.MonkeyPatch, name: str, mode: str) -> None:
    """One reason per step, one read more, and every row has what vLLM gives it; a grammar and NaN pads beside it."""
    monkeypatch.setattr(logit_bias, "MOST_BIASES", 3)
    twins = Twins(engine_config(mode, logits_processors=[Favourite]))
    plain = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, frequency_penalty=0.4)
    names = [twins.add(plain), twins.add(asks_for(name)), twins.add(SamplingParams(temperature=1.1, seed=2))]
    rng, weights = random.Random(3), torch.Generator().manual_seed(9)
    for step in range(4):
        twins.sync(names)
        grammar = random_grammar(twins.batch.req_ids, rng) if step % 2 else None
        twins.host.take_counts()
        found, expected = twins.sample(poisoned_logits(3, MAX_ROWS, weights), grammar)
        counts = twins.host.take_counts()
        assert counts.reads == 3  # tokens, logprobs, the row
        assert twins.bypasses[step:] == [f"sampling on host: {name}"]
        assert f"sampling: {name}" in counts.stages
        assert found.tokens == expected.tokens
        assert found.logprobs is not None
        assert expected.logprobs is not None
        for one, width in ((names[0], 3), (names[1], 4 if name == "logprob_token_ids" else 0)):
            slot = twins.batch.req_ids.index(one)
            np.testing.assert_allclose(
                found.logprobs.logprobs[slot, :width], expected.logprobs.logprobs[slot, :width], rtol=1e-6
            )
            assert found.logprobs.sampled_token_ranks[slot] == expected.logprobs.sampled_token_ranks[slot]
        assert np.isfinite(found.logprobs.logprobs[twins.batch.req_ids.index(names[0]), :3]).any()


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_beside_a_row_of_many(mode: str) -> None:
    """Of each request as many as it asked for, bit for bit as vLLM's."""
    twins = Twins(engine_config(mode))
    wanted = [WIDTH + 3, 2, VOCAB, 0]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=9, logprobs=n) for i, n in enumerate(wanted)]
    names = [twins.add(one) for one in params]
    twins.sync(names)
    found, expected = twins.sample(poisoned_logits(4, 6, torch.Generator().manual_seed(2)))
    assert found.tokens == expected.tokens
    assert found.logprobs is not None
    assert expected.logprobs is not None
    for slot, request in enumerate(twins.batch.slots):
        width = (request.sampling_params.logprobs or 0) + 1
        np.testing.assert_array_equal(found.logprobs.logprobs[slot, :width], expected.logprobs.logprobs[slot, :width])
        assert found.logprobs.sampled_token_ranks[slot] == expected.logprobs.sampled_token_ranks[slot]


def test_a_processor_behind_the_temperature_is_applied_on_the_host() -> None:
    twins = Twins(engine_config(logits_processors=[Late]))
    twins.sync([twins.add(asks_for("custom logits processors")), twins.add(SamplingParams(temperature=0.0))])
    assert_same(*twins.sample(poisoned_logits(2, 4, torch.Generator().manual_seed(0))))
    assert twins.bypasses == ["sampling on host: custom logits processors"]


def test_a_processor_without_requests_costs_nothing() -> None:
    twins = Twins(engine_config(logits_processors=[Favourite]))
    twins.sync([twins.add(SamplingParams(temperature=0.7))])
    assert_same(*twins.sample(poisoned_logits(1, 4, torch.Generator().manual_seed(0))))
    assert not twins.bypasses
