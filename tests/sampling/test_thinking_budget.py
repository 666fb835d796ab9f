"""The token that ends a request's thinking, compared with a plain search through all of its tokens."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import torch
from vllm import SamplingParams

from vllm_gaudi_ucm.batch.request_table import LiveRequest
from vllm_gaudi_ucm.sampling.thinking_budget import ThinkingBudget, ThinkingMarkers, thinking_markers

MARKERS = ThinkingMarkers((1, 2), (3,), (4, 4, 5, 3))


class Request:
    """The part of a live request that the budget reads."""

    def __init__(self, prompt: list[int], budget: int | None, structured: bool = False) -> None:
        self.prompt_token_ids, self.output_token_ids = prompt, list[int]()
        self.sampling_params = SamplingParams(thinking_token_budget=budget)
        if structured:
            self.sampling_params.structured_outputs = cast(Any, object())


def live(request: Request) -> LiveRequest:
    return cast(LiveRequest, request)


def text_of(tokens: list[int] | tuple[int, ...]) -> str:
    return "".join(map(str, tokens))


def expected(tokens: list[int], budget: int) -> int | None:
    """Tokens are digits here, so that Python's search in texts finds markers."""
    text = text_of(tokens)
    start, end = text.rfind(text_of(MARKERS.start)), text.rfind(text_of(MARKERS.natural_end))
    if start <= end or len(text) - start - len(MARKERS.start) < budget:
        return None
    forced = text_of(MARKERS.forced_end)
    begun = max(n for n in range(len(forced)) if text.endswith(forced[:n]))
    return int(forced[begun])


def test_any_tokens() -> None:
    """Step by step, with tokens that come several at once and with some that are taken back."""
    rng = random.Random(5)
    found = 0
    for _ in range(300):
        prompt = [rng.randrange(6) for _ in range(rng.randrange(1, 12))]
        budget = rng.randrange(6)
        request, thinking = Request(prompt, budget), ThinkingBudget(MARKERS)
        for _ in range(25):
            token = thinking.forced(live(request))
            assert token == expected(prompt + request.output_token_ids, budget)
            found += token is not None
            if rng.random() < 0.1:
                del request.output_token_ids[rng.randrange(len(request.output_token_ids) + 1) :]
            else:
                new = rng.randrange(6) if token is None or rng.random() < 0.2 else token
                request.output_token_ids += [new, *(rng.randrange(6) for _ in range(rng.choice([0, 0, 2])))]
    assert found > 500


def test_the_whole_end_is_forced() -> None:
    request, thinking = Request([9, 1, 2, 9], budget=3), ThinkingBudget(MARKERS)
    tokens = []
    for step in range(8):
        forced = thinking.forced(live(request))
        tokens.append(forced)
        request.output_token_ids.append(7 + step % 2 if forced is None else forced)
    assert tokens == [None, None, 4, 4, 5, 3, None, None]


def test_no_budget_and_no_markers() -> None:
    assert ThinkingBudget(MARKERS).forced(live(Request([1, 2, 9], None))) is None
    assert ThinkingBudget(None).forced(live(Request([1, 2, 9], 0))) is None
    assert thinking_markers(cast(Any, SimpleNamespace(reasoning_config=None))) is None
    assert ThinkingBudget(MARKERS).holder([live(Request([1, 2], None))]) is None


def test_forced_logits() -> None:
    """A forced token is the likeliest whatever else forbids it, unless a grammar does."""
    rows = [Request([1, 2], 0), Request([1, 2], 5), Request([1, 2], 0, structured=True), Request([9], None)]
    holder = ThinkingBudget(MARKERS).holder([live(request) for request in rows])
    assert holder is not None
    assert holder.has_tracked_requests()
    logits = torch.randn(4, 10)
    logits[0, 4] = logits[2, 4] = -torch.inf
    before = logits.clone()
    holder.update_state([[]] * 4, None)
    after = holder.apply_to_logits(logits, False, None)
    assert after[0].argmax() == 4
    assert torch.equal(after[1:], before[1:])
    logits[2, 4] = 0
    assert holder.apply_to_logits(logits)[2].argmax() == 4
