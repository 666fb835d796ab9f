"""Helpers of `test_admission.py` that other tests use, too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams

from tests.engine.serving import Engine
from tests.engine.tiny_models import VOCAB

RNG = random.Random(8)
COMMON = [RNG.randrange(3, VOCAB) for _ in range(64)]
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(RNG.randint(5, 90))] for _ in range(9)]
PROMPTS += [COMMON + [RNG.randrange(3, VOCAB) for _ in range(count)] for count in (3, 20, 40)]
LENGTHS = [RNG.choice([5, 40, 120]) for _ in PROMPTS]
ARRIVALS = sorted(RNG.randrange(40) for _ in PROMPTS)


# a cache of 640 tokens, where all together would have three times as many
SMALL: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 41}


def serve(engine: Engine, params: Sequence[SamplingParams]) -> dict[str, list[int]]:
    """Tokens of each prompt; they arrive one by one."""
    finished: dict[str, list[int]] = {}
    step = 0
    while len(finished) < len(PROMPTS):
        for index, arrival in enumerate(ARRIVALS):
            if arrival == step:
                engine.add(f"r{index}", PROMPTS[index], params[index])
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
        assert step < 4000, "nobody waits for ever"
    return finished
