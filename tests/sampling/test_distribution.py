"""Tokens are drawn from the distribution that the parameters define: chi-square against float64, alone and mixed."""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm import SamplingParams

from tests.sampling.sampling_twins import MAX_ROWS, VOCAB, Twins, engine_config, poisoned_logits

PROMPT = [3, 5, 5, 7]
OUTPUTS = [9, 9, 11]
DRAWS = 500

KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top-k": {"temperature": 0.9, "top_k": 6},
    "top-p": {"temperature": 1.0, "top_p": 0.6},
    "min-p": {"temperature": 1.2, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    "logit bias": {"logit_bias": {4: 2.0, 5: -3.0, 69: 4.0}},
    "allowed tokens": {"allowed_token_ids": [1, 5, 9, 40, 69]},
    "bad words": {"bad_words": [[9], [11, 3], [12, 4], [11, 5]]},
    "min tokens": {"min_tokens": 9, "stop_token_ids": list(range(0, VOCAB, 2))},
    "all": {
        "temperature": 1.1,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {4: 2.0, 9: 1.0},
        "allowed_token_ids": list(range(1, VOCAB)),
        "min_tokens": 5,
        "stop_token_ids": [2, 6, 10],
    },
}


def exact(logits: torch.Tensor, asked: dict[str, Any]) -> torch.Tensor:
    """Probabilities in float64, from the definitions of the parameters."""
    scores = logits.double().clone()
    allowed = asked.get("allowed_token_ids", range(VOCAB))
    forbidden = {token for token in range(VOCAB) if token not in set(allowed)}
    for word in asked.get("bad_words", ()):
        if OUTPUTS[len(OUTPUTS) - len(word) + 1 :] == word[:-1]:
            forbidden.add(word[-1])
    if asked.get("min_tokens", 0) > len(OUTPUTS):
        forbidden |= set(asked["stop_token_ids"])
    for token, bias in asked.get("logit_bias", {}).items():
        scores[token] += bias
    for token in set(PROMPT) | set(OUTPUTS):
        factor = asked.get("repetition_penalty", 1.0)
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(OUTPUTS):
        scores[token] -= asked.get("frequency_penalty", 0.0) * OUTPUTS.count(token)
        scores[token] -= asked.get("presence_penalty", 0.0)
    scores[sorted(forbidden)] = -math.inf
    scores /= asked.get("temperature", 1.0)
    found = scores.softmax(0)
    found[found < asked.get("min_p", 0.0) * found.max()] = 0
    order = found.argsort(descending=True)
    found[order[asked.get("top_k", VOCAB) :]] = 0
    found /= found.sum()
    before = found[order].cumsum(0) - found[order]
    found[order[before >= asked.get("top_p", 1.0)]] = 0
    return found / found.sum()


def draw(names: list[str], logits: torch.Tensor, rows: int, draws: int) -> dict[str, list[int]]:
    """Tokens of some kinds as rows of one batch, each at so many positions; the rest of the bucket is pads of NaN."""
    twins = Twins(engine_config())
    for name in names:
        asked = dict(KINDS[name])
        words = asked.pop("bad_words", None)
        params = SamplingParams(**{"temperature": 1.0, "seed": list(KINDS).index(name), **asked})
        params._bad_words_token_ids = words
        twins.add(params, PROMPT, name)
    twins.sync(names)
    bucket = torch.full((rows, VOCAB), torch.nan)
    bucket[: len(names)] = logits
    drawn: dict[str, list[int]] = {name: [] for name in names}
    for number in range(draws):
        for request in twins.batch.slots:
            # only the position is new
            request.prompt_token_ids[:] = PROMPT + [3] * number
            request.output_token_ids[:] = OUTPUTS
        found = twins.static.sample(bucket.clone(), twins.batch, None).tokens
        for request, (token,) in zip(twins.batch.slots, found, strict=True):
            drawn[request.request_id].append(token)
    assert not twins.bypasses
    return drawn


def test_tokens_follow_their_distribution() -> None:
    """Each kind beside others, and what it draws alone is what it draws together."""
    logits = poisoned_logits(1, 1, torch.Generator().manual_seed(5))[0]
    names = list(KINDS)
    drawn = draw(names[:5], logits, MAX_ROWS, DRAWS) | draw(names[5:], logits, 5, DRAWS)
    for name, tokens in drawn.items():
        assert draw([name], logits, 1, 5)[name] == tokens[:5]
        expected = exact(logits, KINDS[name])
        counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB).double()
        assert bool((counts[expected == 0] == 0).all()), name
        # rare tokens are one class
        often = expected * DRAWS >= 5
        classes = torch.cat((expected[often], expected[~often].sum()[None])) * DRAWS
        seen = torch.cat((counts[often], counts[~often].sum()[None]))
        square = float(((seen - classes) ** 2 / classes.clamp(min=1.0)).sum())
        assert square < len(classes) + 5 * math.sqrt(2 * len(classes)), name
