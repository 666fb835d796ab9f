"""The hpu path of the whole plugin, on the simulated card: a model's tokens equal those of the cpu device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.hpu_counts import BEFORE_BUCKETS
from tests.engine.hpu_engine import OPTIONS, PROMPTS, run_on_hpu
from tests.engine.serving import Answer, Engine, assert_same

pytestmark = pytest.mark.slow  # starts engines on the simulated card


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
