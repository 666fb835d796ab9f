"""Pooling on the simulated card: outputs are Transformers', and nothing is compiled once buckets are warm."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import tiny_models
from tests.engine.hpu_counts import broken_duties, layer_graphs, remains
from tests.engine.hpu_process import run_on_card
from tests.engine.pooling_models import Reference, cosine, make_encoder, make_prompts, write_model
from tests.engine.serving import Engine

pytestmark = pytest.mark.slow  # starts engines on the simulated card

PROMPTS = make_prompts((1, 5, 16, 40, 16, 100))
OPTIONS: dict[str, Any] = {
    "runner": "pooling",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "skip_tokenizer_init": False,
    "kv_cache_memory_bytes": 4 << 20,
}
GRAPHS = {"warm_up": "full", "max_graphs": 4}


def embed(model: str, ucm: dict[str, Any], options: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Returns the embeddings of two rounds, and the card's counts after the start and in the end."""
    with Engine(Path(model), ucm, **options) as engine:
        from habana_frameworks.torch.simulator import card

        started = dataclasses.asdict(card)
        rounds = []
        for _ in range(2):
            found = engine.llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
            rounds.append([list(output.outputs.embedding) for output in found])
        pooler = engine.runner.pooler
        assert pooler is not None
        return {
            "rounds": rounds,
            "started": started,
            "card": dataclasses.asdict(card),
            "device": str(next(engine.runner.decoder.model.parameters()).device),
            "pooler": str(pooler.device),
            "regions": layer_graphs(engine) if engine.runner.static is not None else {},
            "broken": broken_duties(),
            "remains": remains(),
        }


def check(model: Path, folder: Path, pooling: str, ucm: dict[str, Any], *, lazy: bool = False) -> dict[str, Any]:
    run: dict[str, Any] = run_on_card(
        embed, folder, lazy=lazy, model=str(model), ucm=ucm, options=OPTIONS, prompts=PROMPTS
    ).result
    assert run["device"].startswith("hpu")
    assert run["pooler"] == "cpu"
    reference = Reference(model)
    for embeddings in run["rounds"]:
        for prompt, embedding in zip(PROMPTS, embeddings, strict=True):
            assert cosine(torch.tensor(embedding), reference.embedding(prompt, pooling)) > 0.9999, len(prompt)
    assert run["broken"] == {}
    assert run["remains"] == []
    return run


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_models.make_config("llama")
    return write_model(tmp_path_factory.mktemp("models") / "llama", config, classifies=False)


@pytest.mark.parametrize("family", ["bert", "modernbert", "xlm-roberta"])
def test_an_encoder_in_compile_mode(tmp_path: Path, family: str) -> None:
    run = check(make_encoder(tmp_path / "model", family), tmp_path, "cls", {"graphs": GRAPHS})
    for count in ("compiled_graphs", "compilations", "bypasses"):
        assert run["card"][count] == run["started"][count], count
    assert run["regions"]["buckets"] > 1


def test_an_encoder_in_lazy_mode(tmp_path: Path) -> None:
    run = check(make_encoder(tmp_path / "model", "bert"), tmp_path, "cls", {"graphs": GRAPHS}, lazy=True)
    assert run["card"]["replays"] > 0
    for count in ("captures", "compilations", "bypasses"):
        assert run["card"][count] == run["started"][count], count


def test_an_encoder_at_true_shapes(tmp_path: Path) -> None:
    check(make_encoder(tmp_path / "model", "bert"), tmp_path, "cls", {"graphs": {"mode": "off"}})


def test_a_decoder_in_compile_mode(decoder: Path, tmp_path: Path) -> None:
    run = check(decoder, tmp_path, "last", {"graphs": {**GRAPHS, "max_graphs": 8}})
    for count in ("compiled_graphs", "compilations", "bypasses"):
        assert run["card"][count] == run["started"][count], count
