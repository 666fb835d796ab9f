"""Servers of vllm-gaudi and traffics for the tests of their buckets."""

from __future__ import annotations

import random
from typing import Any

from vllm_gaudi_ucm.graphs.cost.specs import DEVICES, LLAMA_8B
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm_tools.vllm_gaudi.settings import Settings
from vllm_gaudi_ucm_tools.vllm_gaudi.shape_cost import ShapeCost
from vllm_gaudi_ucm_tools.vllm_gaudi.simulation import simulate
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Request, Traffic

COST = ShapeCost(CostModel(DEVICES["gaudi2"], LLAMA_8B, 128))
CONTIGUOUS = {"VLLM_CONTIGUOUS_PA": "true"}


def server(tokens: int, requests: int, length: int, blocks: int, **more: Any) -> Settings:
    """Returns a server with blocks of 128 tokens."""
    return Settings(tokens, requests, length, more.pop("block", 128), blocks, **more)


def requests(number: int, rate: float, prompt: int, output: int, seed: int, prefix: int = 0) -> list[Request]:
    """Returns requests of different lengths around these medians, a part of which share a prefix."""
    rng = random.Random(seed)
    clock, found = 0.0, []
    for _ in range(number):
        clock += rng.expovariate(rate)
        own = min(4 * prompt, 1 + int(prompt * rng.lognormvariate(0, 0.8)))
        answer = min(4 * output, 1 + int(output * rng.lognormvariate(0, 0.8)))
        shared = prefix * (rng.random() < 0.6)
        found.append(Request(clock, shared + own, answer, tuple(range(shared // 16)), 16 if shared else 0))
    return found


# Ten traffics: servers with each setting that decides about look-ups, and requests that fill them more or less.
TRAFFICS: dict[str, tuple[Settings, list[Request]]] = {
    "chat": (server(2048, 32, 4096, 1000), requests(60, 8.0, 200, 40, 1)),
    "shared prefix": (server(2048, 32, 8192, 1500), requests(60, 8.0, 150, 40, 2, prefix=1000)),
    "contiguous": (server(2048, 32, 4096, 600, prefix_caching=False), requests(80, 20.0, 300, 50, 3)),
    "contiguous, full": (server(1024, 64, 2048, 160, prefix_caching=False), requests(80, 60.0, 200, 60, 4)),
    "merged prompts": (
        server(2048, 32, 4096, 1000, environment={"VLLM_PROMPT_BS_BUCKET_MAX": "8"}),
        requests(80, 200.0, 100, 20, 5),
    ),
    "drafts": (server(2048, 32, 4096, 1000, drafts=2), requests(50, 10.0, 200, 60, 6)),
    "contiguous drafts": (server(2048, 16, 4096, 500, drafts=3, prefix_caching=False), requests(40, 10.0, 200, 60, 7)),
    "two ranks": (server(2048, 16, 4096, 600, ranks=2), requests(60, 12.0, 200, 40, 8)),
    "long": (server(4096, 8, 32768, 2000), requests(12, 1.0, 5000, 40, 9)),
    "hybrid": (server(2048, 16, 4096, 800, hybrid_chunk=256), requests(40, 10.0, 300, 30, 10)),
}


def traffic(name: str) -> tuple[Settings, Traffic]:
    """Returns a traffic of `TRAFFICS`, simulated."""
    settings, log = TRAFFICS[name]
    return settings, Traffic(name, simulate(log, settings, COST))
