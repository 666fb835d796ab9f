"""The hpu path of the whole plugin, on the simulated card: the demo model's tokens equal those of the cpu device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, assert_same

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
        device = next(iter(engine.runner.parts.kv_caches.values())).device
        return {
            "rounds": [[dataclasses.asdict(answer) for answer in found] for found in answers],
            "started": started,
            "card": dataclasses.asdict(card),
            "device": str(device),
        }


@dataclass(frozen=True)
class HpuRun:
    """What an engine on the simulated card answered, and the card's counts after its start and in the end."""

    rounds: list[list[Answer]]
    started: dict[str, Any]
    card: dict[str, Any]
    device: str


def run_on_hpu(
    model: Path,
    folder: Path,
    ucm: dict[str, Any],
    rounds: int = 1,
    prompts: Sequence[Any] = PROMPTS,
    env: Mapping[str, str] | None = None,
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
    found = run_on_card(serve, folder, env, **asked).result
    found["rounds"] = [[Answer(**answer) for answer in answers] for answers in found["rounds"]]
    return HpuRun(**found)


@pytest.fixture(scope="module")
def cpu_answers(smol_engine: Engine) -> list[Answer]:
    return smol_engine.greedy(PROMPTS, max_tokens=8)


def test_true_shapes(cpu_answers: list[Answer], smollm2: Path, tmp_path: Path) -> None:
    """Without buckets every new shape is compiled, and the answers are the same."""
    run = run_on_hpu(smollm2, tmp_path, {"graphs": {"mode": "off"}})
    assert run.device == "hpu:0"
    assert_same(run.rounds[0], cpu_answers, near_ties=0)
    assert run.card["captures"] == 0
    assert run.card["compilations"] > run.started["compilations"]


def test_static_shapes(cpu_answers: list[Answer], smollm2: Path, tmp_path: Path) -> None:
    """HPU graphs in lazy mode: once warm, whole rounds of requests compile nothing, and the answers are the same."""
    run = run_on_hpu(smollm2, tmp_path, {"graphs": {"warm_up": "skeleton", "max_graphs": 12}}, rounds=2)
    for answers in run.rounds:
        assert_same(answers, cpu_answers, near_ties=0)
    assert run.started["captures"] > 0
    assert run.started["compilations"] >= run.started["captures"]
    assert run.card["replays"] > 0
    for count in ("captures", "compilations", "bypasses"):
        assert run.card[count] == run.started[count], count


def test_compile_mode(tiny_llama: Path, tmp_path: Path) -> None:
    """Buckets through torch.compile, PT_HPU_LAZY_MODE=0: once warm nothing is compiled, the answers are the same."""
    prompts = [list(range(3, 3 + length)) for length in (5, 40, 1, 150)]
    options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 20}
    with Engine(tiny_llama, **{**OPTIONS, **options}) as engine:
        expected = engine.greedy(prompts, max_tokens=8)
    graphs = {"warm_up": "skeleton", "skeleton": 2, "max_graphs": 6}
    run = run_on_hpu(tiny_llama, tmp_path, {"graphs": graphs}, 2, prompts, {"PT_HPU_LAZY_MODE": "0"}, **options)
    for answers in run.rounds:
        assert_same(answers, expected, near_ties=0)
    assert run.started["compiled_graphs"] > 0
    for count in ("compiled_graphs", "compilations"):
        assert run.card[count] == run.started[count], count
