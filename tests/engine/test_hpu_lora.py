"""Adapters (LoRA) on the simulated card: once the buckets are warm, no mix of adapters compiles anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import ALL_LINEAR, EMBEDDINGS, make_adapter, request_of
from tests.engine.hpu_counts import BEFORE_BUCKETS, broken_duties, layer_graphs
from tests.engine.hpu_process import run_on_card
from tests.engine.lora_requests import ask
from tests.engine.serving import Answer, Engine, assert_same

pytestmark = pytest.mark.slow  # starts engines on the simulated card

OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "block_size": 32,
    "kv_cache_memory_bytes": 4 << 20,
}
PROMPTS = [list(range(3, 3 + length)) for length in (5, 40, 150)]
GRAPHS = {"warm_up": "skeleton", "skeleton": 3, "max_graphs": 4}


def serve(model: str, adapters: list[str], ucm: dict[str, Any], in_regions: bool) -> dict[str, Any]:
    """Answers without adapters, then with each and with none, and what was compiled meanwhile."""
    with Engine(Path(model), ucm, **OPTIONS) as engine:
        from habana_frameworks.torch.simulator import card

        asked = requests(adapters)
        started = dataclasses.asdict(card)
        rounds = [ask(engine, [(prompt, None) for prompt in PROMPTS], 8), ask(engine, asked, 8), ask(engine, asked, 8)]
        return {
            "rounds": [[dataclasses.asdict(answer) for answer in found] for found in rounds],
            "started": started,
            "card": dataclasses.asdict(card),
            "regions": layer_graphs(engine) if in_regions else {},
            "broken": broken_duties(),
        }


def requests(adapters: list[str]) -> list[Any]:
    named = [None, *(request_of(Path(folder), number) for number, folder in enumerate(adapters, 1))]
    return [(prompt, adapter) for prompt in PROMPTS for adapter in named]


@pytest.mark.parametrize("lazy", [False, True], ids=["compile", "lazy"])
def test_no_mix_of_adapters_compiles_anything(tiny_llama: Path, tmp_path: Path, lazy: bool) -> None:
    every = (*ALL_LINEAR, *EMBEDDINGS)
    adapters = [str(make_adapter(tmp_path / f"{seed}", tiny_llama, modules=every, seed=seed)) for seed in range(3)]
    with Engine(tiny_llama, {}, **OPTIONS) as engine:
        expected = ask(engine, requests(adapters), 8)
        alone = ask(engine, [(prompt, None) for prompt in PROMPTS], 8)
    assert len({tuple(answer.tokens) for answer in expected[-4:]}) == 4
    asked = {"model": str(tiny_llama), "adapters": adapters, "ucm": {"graphs": GRAPHS}, "in_regions": not lazy}
    found = run_on_card(serve, tmp_path, lazy=lazy, **asked).result
    rounds = [[Answer(**answer) for answer in answers] for answers in found["rounds"]]
    assert_same(rounds[0], alone, near_ties=0)
    for answers in rounds[1:]:
        assert_same(answers, expected, near_ties=0)
    assert found["broken"] == {}
    for count in ("compiled_graphs", "compilations", "captures"):
        assert found["card"][count] == found["started"][count], count
    if not lazy:
        regions = found["regions"]
        assert regions["buckets"] <= regions["graphs"] <= regions["buckets"] + BEFORE_BUCKETS
