"""Helpers of `test_sparse.py` that other tests use, too."""

from __future__ import annotations

import random
from typing import Any

from tests.engine.tiny_models import VOCAB

RNG = random.Random(4)


def tokens(count: int) -> list[int]:
    return [RNG.randrange(3, VOCAB) for _ in range(count)]


COMMON = tokens(96)
PROMPTS = [tokens(count) for count in (1, 17, 40, 130, 200, 260)]
PROMPTS += [COMMON + tokens(3), COMMON + tokens(60), COMMON]


OPTIONS: dict[str, Any] = {"max_model_len": 384, "max_num_seqs": 6, "max_num_batched_tokens": 48}


STATIC = {"mode": "eager", "max_graphs": 15, "warm_up": "full"}
