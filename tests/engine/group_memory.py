"""Helpers of `test_group_memory.py` that other tests use, too."""

from __future__ import annotations

import random
from typing import Any

from tests.engine.tiny_models import VOCAB
from tests.engine.window_models import WINDOW

TOKENS = 24


LENGTHS = (1, 110, WINDOW + 3, 90, 16, 64)


OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 6, "max_model_len": 144}


SWAP = {"preemption": {"mode": "swap", "host_memory": 4 << 20}}


def prompts() -> list[list[int]]:
    """Shorter and longer than the window, and than the tokens of a step."""
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
