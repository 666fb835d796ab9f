"""Named mixes of synthetic traffic: what clients ask for, and the server that they ask."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from vllm_gaudi_ucm.graphs.shapes.limits import Limits


class Lengths(NamedTuple):
    """Log-normal token counts, clipped to [low, high]."""

    median: int
    sigma: float
    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return min(self.high, max(self.low, round(self.median * math.exp(rng.gauss(0.0, self.sigma)))))


@dataclass(frozen=True)
class Mix:
    """Clients in a closed loop: each waits, sends a request, reads the answer, and waits again.

    clients: how many at the busiest time; the number swells and ebbs with `period` seconds of the server's clock.
    think: mean seconds between an answer and the next request; 0: every client comes back at once.
    quiet: fraction of the clients that is left at the quietest time.
    prefixes: how many different prefixes (system prompts, tools, documents) there are, and their lengths;
        `prefix_share` of the sessions start with one of them.
    prompt, output: new tokens of a turn, and tokens of an answer.
    turns: mean turns of a session; a turn's prompt holds the whole session so far, most of it cached.
    """

    description: str
    limits: Limits
    clients: int
    think: float
    period: float
    quiet: float
    prefixes: int
    prefix_length: Lengths
    prefix_share: float
    prompt: Lengths
    output: Lengths
    turns: float


def _limits(tokens: int, requests: int, length: int, blocks: int) -> Limits:
    return Limits(tokens, requests, length, block_size=128, num_blocks=blocks, contiguous=False)


MIXES = {
    "chat": Mix(
        description="conversations of a few turns over four system prompts, load swelling and ebbing",
        limits=_limits(2048, 64, 8192, 3400),
        clients=260,
        think=4.0,
        period=60.0,
        quiet=0.1,
        prefixes=4,
        prefix_length=Lengths(600, 0.6, 100, 2000),
        prefix_share=0.75,
        prompt=Lengths(120, 1.0, 8, 2500),
        output=Lengths(180, 0.8, 4, 1200),
        turns=3.0,
    ),
    "long-context": Mix(
        description="questions about documents of 2K to 30K tokens, a few of them asked about again and again",
        limits=_limits(4096, 32, 32768, 3400),
        clients=48,
        think=6.0,
        period=120.0,
        quiet=0.15,
        prefixes=6,
        prefix_length=Lengths(12000, 0.6, 2000, 28000),
        prefix_share=0.4,
        prompt=Lengths(3000, 1.3, 50, 28000),
        output=Lengths(250, 0.7, 16, 1500),
        turns=1.5,
    ),
    "batch": Mix(
        description="offline jobs that keep the server full, two few-shot prompts, and the tails of the jobs",
        limits=_limits(8192, 256, 4096, 1500),
        clients=300,
        think=0.0,
        period=90.0,
        quiet=0.3,
        prefixes=2,
        prefix_length=Lengths(900, 0.3, 400, 1600),
        prefix_share=0.5,
        prompt=Lengths(350, 0.8, 16, 2000),
        output=Lengths(220, 0.7, 8, 900),
        turns=1.0,
    ),
    "agentic": Mix(
        description="agents with a long shared tool prompt and many short turns whose context grows",
        limits=_limits(4096, 48, 16384, 3400),
        clients=130,
        think=1.5,
        period=60.0,
        quiet=0.15,
        prefixes=3,
        prefix_length=Lengths(4500, 0.3, 2500, 7000),
        prefix_share=1.0,
        prompt=Lengths(350, 1.1, 16, 3000),
        output=Lengths(80, 0.8, 8, 600),
        turns=9.0,
    ),
}
