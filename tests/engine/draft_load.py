"""Prompts, options and a counter of steps for engines with drafts."""

from __future__ import annotations

import random
from typing import Any

from tests.engine.serving import Engine
from tests.engine.tiny_models import VOCAB

RNG = random.Random(8)
MAX_TOKENS = 20
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 100,
}
STATIC = {"graphs": {"mode": "eager", "recipe_check": "fail", "max_graphs": 14, "warm_up": "full"}}


def tokens(count: int) -> list[int]:
    return [RNG.randrange(3, VOCAB) for _ in range(count)]


COMMON = tokens(64)
# around the block size, longer than a step, with a common beginning, and all in the cache the second time
PROMPTS = [tokens(count) for count in (1, 2, 15, 16, 17, 33, 120)]
PROMPTS += [COMMON + tokens(3), COMMON[:32] + tokens(9), COMMON]


class Steps:
    """Counts the steps of an engine, the requests that got tokens in them, and these tokens."""

    def __init__(self, engine: Engine) -> None:
        self.steps = self.requests = self.tokens = 0
        steps = engine.runner.parts.steps
        self._sample = steps.sample_tokens
        steps.sample_tokens = self._counted  # type: ignore[method-assign]

    def _counted(self, grammar_output: Any) -> Any:
        output = self._sample(grammar_output)
        self.steps += 1
        self.requests += sum(1 for sampled in output.sampled_token_ids if sampled)
        self.tokens += sum(map(len, output.sampled_token_ids))
        return output
