"""Requests whose thinking ends at `thinking_token_budget`, in every way of sampling."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.async_drafts import drafted_by
from tests.engine.serving import Engine
from tests.engine.static_shapes import static
from tests.engine.thinking import END, FORCED, START, reasoning
from tests.platform.features import NGRAM

COUNT = 20
# prompts that think, have thought, do not think, and think for longer than some budgets already
PROMPTS = [
    [5, 6, 7, *START],
    [5, *START, 8, 9, *END, 30],
    [31, 32, 33, 34] * 4,
    [40, *START, 41, 42, 43, 41, 42, 43],
]
BUDGETS = [6, 3, 2, 4]

Case = tuple[dict[str, Any], dict[str, Any]]
WAYS: dict[str, Case] = {
    "true shapes": ({}, {"async_scheduling": False}),
    "buckets": (static(), {"async_scheduling": False}),
    "async": (static(), {"async_scheduling": True}),
    "async at true shapes": ({}, {"async_scheduling": True}),
    "n-grams": ({}, {"speculative_config": NGRAM}),
    "n-grams in buckets": (static(), {"speculative_config": NGRAM}),
}


def params(budget: int | None, **asked: Any) -> SamplingParams:
    given = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True, **asked}
    return SamplingParams(thinking_token_budget=budget, **given)


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(tiny_llama) as engine:
        yield engine


def expected(plain: Engine, prompt: list[int], budget: int, count: int = COUNT) -> list[int]:
    """The tokens of an engine without budgets, which gets the forced ones as part of its prompt."""
    found: list[int] = []
    while len(found) < count:
        tokens = prompt + found
        start, end = _last(tokens, START), _last(tokens, END)
        room = budget - (len(tokens) - start - len(START)) if start > end else 1
        if room <= 0:
            begun = next(n for n in range(len(FORCED) - 1, -1, -1) if tokens[len(tokens) - n :] == FORCED[:n])
            found.append(FORCED[begun])
        else:
            found += plain.greedy([tokens], 1)[0].tokens
    return found


def _last(tokens: list[int], marker: list[int]) -> int:
    width = len(marker)
    return max((at for at in range(len(tokens)) if tokens[at : at + width] == marker), default=-1)


@pytest.mark.parametrize("way", WAYS)
def test_budgets(tiny_llama: Path, plain: Engine, way: str) -> None:
    ucm, options = WAYS[way]
    wanted = [expected(plain, prompt, budget) for prompt, budget in zip(PROMPTS, BUDGETS, strict=True)]
    # the first thinks for 6 tokens, the last for 6 already
    assert wanted[0][6:9] == wanted[3][:3] == FORCED
    with Engine(tiny_llama, ucm, reasoning_config=reasoning(), **options) as engine:
        free = engine.generate(PROMPTS, params(None))
        found = engine.generate([*PROMPTS, PROMPTS[0]], [*map(params, BUDGETS), params(0, logprobs=2)])
        assert [list(output.outputs[0].token_ids) for output in found[:4]] == wanted
        assert list(found[4].outputs[0].token_ids)[:3] == FORCED
        # raw logprobs are the model's own, whatever was forced
        scores = found[4].outputs[0].logprobs
        assert scores is not None
        assert scores[0][FORCED[0]].logprob < -0.01
        unbounded = [plain.greedy([prompt], COUNT)[0].tokens for prompt in PROMPTS]
        assert [list(output.outputs[0].token_ids) for output in free] == unbounded
        engine.check_idle()


@pytest.mark.parametrize("way", ["true shapes", "buckets", "n-grams in buckets"])
def test_other_parameters(tiny_llama: Path, way: str) -> None:
    """Nothing that a request asks for stops the end of its thinking."""
    ucm, options = WAYS[way]
    asked: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 3, "top_k": 3, "top_p": 0.5},
        {"repetition_penalty": 1.5, "presence_penalty": 2.0},
        {"bad_words": None, "_bad_words_token_ids": [[FORCED[0]], [FORCED[0], FORCED[1]]]},
        {"allowed_token_ids": [50, 51, 52]},
        {"min_tokens": COUNT, "stop_token_ids": [FORCED[2]]},
        {"logprobs": 5},
    ]
    with Engine(tiny_llama, ucm, reasoning_config=reasoning(), **options) as engine:
        requests = []
        for parameters in asked:
            words = parameters.pop("_bad_words_token_ids", None)
            request = params(4, **{key: value for key, value in parameters.items() if value is not None})
            if words is not None:
                request._bad_words_token_ids = words
            requests.append(request)
        outputs = engine.generate([PROMPTS[0]] * len(requests), requests)
        for output in outputs:
            assert list(output.outputs[0].token_ids)[4:7] == FORCED
        engine.check_idle()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_model(tiny_llama: Path, plain: Engine, ahead: bool) -> None:
    """The draft model is the model: all drafts are right until a token is forced."""
    wanted = [expected(plain, prompt, budget) for prompt, budget in zip(PROMPTS, BUDGETS, strict=True)]
    options = {"speculative_config": drafted_by(tiny_llama), "async_scheduling": ahead}
    with Engine(tiny_llama, static(), reasoning_config=reasoning(), **options) as engine:
        found = engine.generate(PROMPTS, [*map(params, BUDGETS)])
        assert [list(output.outputs[0].token_ids) for output in found] == wanted
        engine.check_idle()


def test_preempted_requests_keep_their_budget(tiny_llama: Path, plain: Engine, contract: str) -> None:
    """A resumed request has its tokens, and so its budget."""
    prompts = [[50 + i, *START] for i in range(6)]
    wanted = [expected(plain, prompt, 30, 60) for prompt in prompts]
    options = {"num_gpu_blocks_override": 12, "max_model_len": 128, "reasoning_config": reasoning()}
    with Engine(tiny_llama, **options) as engine:
        found = engine.generate(prompts, params(30, max_tokens=60))
        assert engine.preemptions > 0
        assert [list(output.outputs[0].token_ids) for output in found] == wanted
