"""Helpers of `test_families.py` that other tests use, too."""

from __future__ import annotations

import random

from tests.engine.tiny_models import VOCAB


def prompts(count: int = 6, longest: int = 200) -> list[list[int]]:
    rng = random.Random(5)
    lengths = [1, longest, *(rng.randrange(2, longest) for _ in range(count - 2))]
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
