"""Helpers of `test_hpu_engine.py` that other tests use, too."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.hpu_counts import broken_duties, layer_graphs, remains
from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine

SHARED = "You are a helpful assistant. Answer in one short sentence, and do not invent anything that you do not know. "


PROMPTS = [
    "The capital of France is",
    SHARED + "Question: what colour is the sky? Answer:",
    "Once upon a time, there was a",
    SHARED + "Question: how many legs does a spider have? Answer:",
    "def fibonacci(n):",
    " ".join(f"{number} times two is {2 * number}." for number in range(1, 30)),
]


# A step takes at most 128 tokens: the last prompt is chunked while others decode.
OPTIONS = {
    "skip_tokenizer_init": False,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
}


def serve(
    model: str, ucm: dict[str, Any], options: dict[str, Any], prompts: list[Any], max_tokens: int, rounds: int
) -> dict[str, Any]:
    """Answers of each round, and the card's counts after the start and in the end."""
    with Engine(Path(model), ucm, **options) as engine:
        from habana_frameworks.torch.simulator import card

        started = dataclasses.asdict(card)
        answers = [engine.greedy(prompts, max_tokens) for _ in range(rounds)]
        device = engine.cached_blocks()[0].device
        layers = Counter(type(module).__name__ for module in engine.runner.decoder.model.modules())
        return {
            "layers": layers,
            "rounds": [[dataclasses.asdict(answer) for answer in found] for found in answers],
            "started": started,
            "card": dataclasses.asdict(card),
            "device": str(device),
            "regions": layer_graphs(engine) if engine.runner.static is not None else {},
            "broken": broken_duties(),
            "remains": remains(),
        }


@dataclass(frozen=True)
class HpuRun:
    """What an engine on the simulated card answered, the card's counts after its start and in the end, how many layers
    of each class the model has, and what `tests.engine.hpu_counts` tells of the engine."""

    rounds: list[list[Answer]]
    started: dict[str, Any]
    card: dict[str, Any]
    device: str
    layers: dict[str, int]
    regions: dict[str, int]
    broken: dict[str, int]
    remains: list[str]
    log: str


def run_on_hpu(
    model: Path,
    folder: Path,
    ucm: dict[str, Any],
    rounds: int = 1,
    prompts: Sequence[Any] = PROMPTS,
    lazy: bool = False,
    **options: Any,
) -> HpuRun:
    """Starts an engine in a process of its own, because importing the stand-in changes torch for good."""
    asked = {
        "model": str(model),
        "ucm": ucm,
        "options": {**OPTIONS, **options},
        "prompts": prompts,
        "max_tokens": 8,
        "rounds": rounds,
    }
    finished = run_on_card(serve, folder, lazy=lazy, **asked)
    found = finished.result
    found["rounds"] = [[Answer(**answer) for answer in answers] for answers in found["rounds"]]
    return HpuRun(**found, log=finished.log)
