"""The hpu path of the whole plugin, on the simulated card: a model's tokens equal those of the cpu device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hpu_counts import BEFORE_BUCKETS, broken_duties, layer_graphs, remains
from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, assert_same

pytestmark = pytest.mark.slow  # starts engines on the simulated card

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


@pytest.fixture(scope="module")
def cpu_answers(tiny_text_model: Path) -> list[Answer]:
    with Engine(tiny_text_model, **OPTIONS) as engine:
        return engine.greedy(PROMPTS, max_tokens=8)


def test_true_shapes(cpu_answers: list[Answer], tiny_text_model: Path, tmp_path: Path) -> None:
    """Without buckets every new shape is compiled, and the answers are the same."""
    run = run_on_hpu(tiny_text_model, tmp_path, {"graphs": {"mode": "off"}})
    assert run.device == "hpu:0"
    assert run.layers["GaudiRMSNorm"] > 2
    assert run.layers["GaudiRotaryEmbedding"] > 0
    assert not {"RMSNorm", "RotaryEmbedding"} & set(run.layers)
    assert_same(run.rounds[0], cpu_answers, near_ties=0)
    assert run.card["captures"] == 0
    assert run.card["compilations"] > run.started["compilations"]


def test_static_shapes(cpu_answers: list[Answer], tiny_text_model: Path, tmp_path: Path) -> None:
    """HPU graphs in lazy mode: once warm, whole rounds of requests compile nothing, and the answers are the same."""
    run = run_on_hpu(
        tiny_text_model, tmp_path, {"graphs": {"warm_up": "skeleton", "max_graphs": 12}}, rounds=2, lazy=True
    )
    for answers in run.rounds:
        assert_same(answers, cpu_answers, near_ties=0)
    assert run.started["captures"] > 0
    assert run.started["compilations"] >= run.started["captures"]
    assert run.card["replays"] > 0
    for count in ("captures", "compilations", "bypasses"):
        assert run.card[count] == run.started[count], count


def test_compile_mode(tiny_llama: Path, tmp_path: Path) -> None:
    """Buckets through torch.compile, the default: once warm nothing is compiled, the answers are the same."""
    prompts = [list(range(3, 3 + length)) for length in (5, 40, 1, 150)]
    options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 20}
    with Engine(tiny_llama, **{**OPTIONS, **options}) as engine:
        expected = engine.greedy(prompts, max_tokens=8)
    graphs = {"warm_up": "skeleton", "skeleton": 3, "max_graphs": 4}
    run = run_on_hpu(tiny_llama, tmp_path, {"graphs": graphs}, 2, prompts, **options)
    for answers in run.rounds:
        assert_same(answers, expected, near_ties=0)
    assert "Compiled without executing; executed the smallest and the largest bucket of each phase" in run.log
    assert "2 layers of LlamaForCausalLM are one compiled region" in run.log
    assert run.started["compiled_graphs"] > 0
    # one for each bucket, whatever the number of layers
    assert run.regions["buckets"] <= run.regions["graphs"] <= run.regions["buckets"] + BEFORE_BUCKETS
    assert run.broken == {}
    assert run.remains == []
    for count in ("compiled_graphs", "compilations"):
        assert run.card[count] == run.started[count], count
