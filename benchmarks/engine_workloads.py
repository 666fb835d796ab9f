"""The rows of the whole-engine table: their prompts, and by how much we want to win."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Ordinary tokens of any vocabulary we measure: below are special tokens and bytes.
FIRST_TOKEN, LAST_TOKEN = 1000, 30000
START_UP = "start-up"
START_UP_GOAL = 5.0


@dataclass(frozen=True)
class Workload:
    """`requests` requests sent at once, each of `prompt_tokens` random tokens, each answered with `output_tokens`."""

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    goal: float
    """The ratio of throughput to the peer's that we want."""
    is_decode: bool = False
    """Prompts are computed before the clock starts, and found in the prefix cache."""

    @property
    def tokens(self) -> int:
        """Tokens in and out of one repetition; only out if prompts are not measured."""
        return self.requests * ((0 if self.is_decode else self.prompt_tokens) + self.output_tokens)

    def prompts(self, repetition: int) -> list[list[int]]:
        """Prompts of one repetition: the same for every side, and never twice, so that no cache can help."""
        rng = random.Random(f"{self.name}/{repetition}")
        return [[rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(self.prompt_tokens)] for _ in range(self.requests)]


USUAL = (
    Workload("prefill, 4 requests, 1024 + 1", 4, 1024, 1, goal=2.0),
    Workload("decode, 1 request, 32 + 64", 1, 32, 64, goal=1.5),
    Workload("decode, 16 requests, 64 + 64", 16, 64, 64, goal=1.5),
    Workload("mixed, 16 requests, 512 + 32", 16, 512, 32, goal=2.0),
)

# Workloads without tuning: long contexts, and few requests at once.
MORE = (
    Workload("decode, 1 request at 4096, 64 out", 1, 4096, 64, goal=1.0, is_decode=True),
    Workload("decode, 1 request at 8064, 64 out", 1, 8064, 64, goal=1.0, is_decode=True),
    Workload("decode, 2 requests, 64 + 64", 2, 64, 64, goal=1.0),
    Workload("decode, 4 requests, 64 + 64", 4, 64, 64, goal=1.0),
    Workload("decode, 8 requests, 64 + 64", 8, 64, 64, goal=1.0),
    Workload("decode, 4 requests at 2048, 32 out", 4, 2048, 32, goal=1.0, is_decode=True),
)
WORKLOADS = {"usual": USUAL, "more": MORE, "all": USUAL + MORE}
