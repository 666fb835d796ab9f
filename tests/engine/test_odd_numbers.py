"""Whatever numbers a request carries, it is refused on arrival or served; others go on as if it were not there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError

from tests.engine.serving import Engine
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.platform.checks import RequestLimits
from vllm_gaudi_ucm.platform.platform import UcmPlatform

pytestmark = pytest.mark.slow  # starts engines

MAX_MODEL_LEN = 64
INTEGERS = [0, 1, -1, 2, 3, VOCAB - 1, VOCAB, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30]
INTEGERS += [-2, -(1 << 31), -(1 << 63), -(1 << 63) - 1, -(10**30)]
FLOATS = [0.0, -0.0, 5e-324, 1e-320, 1e-45, 1e-7, 0.3, 1.0, 2.0, 100.0, 3e38, 1e39, 1e308, float("inf"), float("nan")]
FLOATS += [-1e-320, -2.0, -100.0, -1e308, -float("inf")]
SALTS = ["a", " ", "\x00", "\ud800", "é" * 3000, "🙂", "../..", "%s{0}\n"]
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "true shapes": ({"graphs": {"mode": "off"}}, {}),
    "static shapes": ({"graphs": {"mode": "eager", "max_graphs": 8, "warm_up": "full"}}, {}),
    "drafts": ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}}),
    "asynchronous": ({"scheduler": {"async_scheduling": True}}, {}),
    "exact admission": ({"scheduler": {"admission": "exact"}}, {"scheduling_policy": "priority"}),
}


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Engine]:
    ucm, options = KINDS[request.param]
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 64, "max_num_seqs": 8, "max_logprobs": -1}
    with pytest.MonkeyPatch.context() as patch:
        # engines of other tests, of which one may have a larger vocabulary
        patch.setattr(UcmPlatform, "_limits", RequestLimits())
        with Engine(tiny_llama, ucm, **sizes, **options) as engine:
            yield engine


def odd_parameters(rng: random.Random) -> dict[str, Any]:
    """Of each kind of number that a request can carry, some."""
    integer, number = (lambda: rng.choice(INTEGERS)), (lambda: rng.choice(FLOATS))
    some = lambda: [integer() for _ in range(rng.randrange(1, 4))]  # noqa: E731
    choices = {
        "seed": integer,
        "temperature": number,
        "top_k": integer,
        "top_p": number,
        "min_p": number,
        "presence_penalty": number,
        "frequency_penalty": number,
        "repetition_penalty": number,
        "logit_bias": lambda: {integer() if rng.random() < 0.3 else rng.randrange(VOCAB): number() for _ in range(2)},
        "stop_token_ids": some,
        "allowed_token_ids": some,
        "min_tokens": integer,
        "max_tokens": integer,
        "logprobs": integer,
        "prompt_logprobs": integer,
        "logprob_token_ids": some,
        "extra_args": lambda: {
            rng.choice(["ucm_sparse", "ucm_other", "kv_transfer_params", "x"]): rng.choice([integer(), number(), {}])
        },
    }
    return {name: choices[name]() for name in rng.sample(sorted(choices), rng.choice([1, 1, 1, 2, 3]))}


def add_odd(engine: Engine, name: str, rng: random.Random) -> bool:
    """Whether it was taken."""
    prompt: dict[str, Any] = {"prompt_token_ids": [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 5, 40]))]}
    if rng.random() < 0.2:
        prompt["prompt_token_ids"][-1] = rng.choice(INTEGERS)
    if rng.random() < 0.2:
        prompt["cache_salt"] = rng.choice(SALTS)
    priority = rng.choice(INTEGERS) if rng.random() < 0.2 else 0
    try:
        params = SamplingParams(**{"max_tokens": 8, "temperature": rng.choice([0.0, 1.0]), **odd_parameters(rng)})
        engine.llm.llm_engine.add_request(name, prompt, params, priority=priority)
    except (VLLMClientError, ValueError, TypeError, OverflowError):
        return False
    return True


NEIGHBOURS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1),
    "random": SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, presence_penalty=0.5),
}


def served(engine: Engine, number: int, others: int, rng: random.Random) -> tuple[dict[str, list[int]], int]:
    """Tokens of the neighbours, and how many odd requests were taken."""
    for name, params in NEIGHBOURS.items():
        engine.add(f"{name} {number}", [5, 6, 7, 8, 9], params)
    taken = sum(add_odd(engine, f"odd {number} {other}", rng) for other in range(others))
    found: dict[str, list[int]] = {}
    while engine.core.scheduler.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
    for tokens in found.values():
        assert all(0 <= token < VOCAB for token in tokens)
    return {name: found[f"{name} {number}"] for name in NEIGHBOURS}, taken


def test_odd_numbers_end_no_step(engine: Engine) -> None:
    """covers: D5 (user data never raises in the engine)"""
    rng = random.Random(5)
    expected, _ = served(engine, 0, 0, rng)
    taken = 0
    for number in range(1, 40):
        found, count = served(engine, number, 4, rng)
        assert found == expected, number
        taken += count
    engine.check_idle()
    assert taken > 20


def test_a_child_of_the_largest_seed(engine: Engine) -> None:
    """`n` makes seeds of its own, one beyond what a server accepts."""
    params = SamplingParams(n=3, temperature=1.0, seed=(1 << 63) - 1, max_tokens=8, ignore_eos=True)
    first, second = (engine.generate([[5, 6, 7]], params)[0].outputs for _ in range(2))
    assert [one.token_ids for one in first] == [one.token_ids for one in second]
    assert len({tuple(one.token_ids) for one in first}) == 3
