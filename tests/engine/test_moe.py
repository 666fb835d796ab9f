"""Mixtures of experts: the tokens of Transformers, however requests are batched, padded, shared out or made sparse."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.hpu_counts import BEFORE_BUCKETS
from tests.engine.hpu_engine import serve
from tests.engine.hpu_process import run_on_card
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import VOCAB, make_config, make_model
from vllm_gaudi_ucm.vllm_api.moe import RoutedExperts

pytestmark = pytest.mark.slow  # starts engines

FAMILIES = {
    "mixtral": "mixtral.MixtralForCausalLM",
    "qwen2_moe": "qwen2_moe.Qwen2MoeForCausalLM",
    "qwen3_moe": "qwen3_moe.Qwen3MoeForCausalLM",
    "olmoe": "olmoe.OlmoeForCausalLM",
    "glm4_moe": "glm4_moe.Glm4MoeForCausalLM",
}
RNG = random.Random(6)


def tokens(count: int) -> list[int]:
    return [RNG.randrange(3, VOCAB) for _ in range(count)]


COMMON = tokens(48)
PROMPTS = [tokens(1), tokens(17), COMMON + tokens(5), COMMON + tokens(60), tokens(100)]
# prompts are chunked, and some requests preempted
TIGHT: dict[str, Any] = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 28, "max_model_len": 192}
PADDED = {"graphs": {"mode": "eager", "max_graphs": 6}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(tmp_path_factory.mktemp(name), make_config(name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def answers(models: dict[str, Path]) -> dict[str, list[Answer]]:
    """At true shapes; each family's is checked against Transformers by a test."""
    found = {}
    for name, model in models.items():
        with Engine(model, **TIGHT) as engine:
            kind = type(engine.runner.decoder.model)
            # vLLM's own class, not its fallback to the code of Transformers
            assert f"{kind.__module__}.{kind.__name__}" == f"vllm.model_executor.models.{FAMILIES[name]}"
            found[name] = engine.greedy(PROMPTS, 64)
            assert engine.preemptions > 0
            again = engine.greedy(PROMPTS[2:4], 64)
            assert_same(again, found[name][2:4])
            assert all(answer.cached_tokens >= 48 for answer in again)
            engine.check_idle()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(
    models: dict[str, Path], answers: dict[str, list[Answer]], family: str
) -> None:
    """Plain, with a prefix in the cache, in chunks, and preempted. covers: A12"""
    ReferenceModel(models[family]).assert_greedy(PROMPTS, answers[family])


@pytest.mark.parametrize(("family", "recipes"), [("qwen2_moe", "off"), ("mixtral", "fail")])
def test_buckets(models: dict[str, Path], answers: dict[str, list[Answer]], family: str, recipes: str) -> None:
    """Grouped by expert in Python, and with operators that are the same in each step."""
    ucm = {"graphs": {**PADDED["graphs"], "recipe_check": recipes}}
    with Engine(models[family], ucm, **TIGHT) as engine:
        (first, *_) = (m for m in engine.runner.decoder.model.modules() if isinstance(m, RoutedExperts))
        chosen = first.quant_method.experts.implementation.name
        assert chosen == ("cpu" if recipes == "off" else "reference")
        assert_same(engine.greedy(PROMPTS, 20), [answer.first(20) for answer in answers[family]])


def test_padded_rows_take_no_expert(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fill a bucket up compute no expert, and what they hold reaches nobody."""
    from vllm_gaudi_ucm.layers import experts as layer

    seen: list[tuple[int, int]] = []
    plain = layer.mixture_of_experts

    def watched(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, experts: Any) -> torch.Tensor:
        without = (ids >= experts.count).all(1)
        seen.append((len(ids), int(without.sum())))
        return plain(x.masked_fill(without.unsqueeze(1), float("nan")), ids, shares, experts)

    prompt = PROMPTS[1]
    with Engine(models["mixtral"], PADDED, **TIGHT) as engine:
        expected = engine.greedy([prompt], 4)
        monkeypatch.setattr(layer, "mixture_of_experts", watched)
        engine.llm.reset_prefix_cache()
        assert_same(engine.greedy([prompt], 4), expected)
    rows = {rows - without for rows, without in seen}
    assert rows == {1, len(prompt)}
    assert any(without for _, without in seen)


def test_sparse_attention_beside_experts(models: dict[str, Path], answers: dict[str, list[Answer]]) -> None:
    """A sparse method touches attention alone: with a budget of all blocks the tokens are the same. covers: C13"""
    options = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 2}
    ucm = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {**options, "sparse_ratio": 1.0}}}
    with Engine(models["qwen3_moe"], ucm, **TIGHT) as engine:
        assert_same(engine.greedy(PROMPTS, 20), [answer.first(20) for answer in answers["qwen3_moe"]])


@pytest.mark.parametrize(("family", "whole"), [("qwen2_moe", False), ("qwen3_moe", True)])
def test_two_workers(models: dict[str, Path], answers: dict[str, list[Answer]], family: str, whole: bool) -> None:
    """Each has a part of every expert, or half of the experts."""
    ucm = {"distributed": {"check_ranks": True}}
    with Engine(models[family], ucm, tensor_parallel_size=2, enable_expert_parallel=whole, **TIGHT) as engine:
        counts = engine.llm.collective_rpc(local_experts)
        assert counts == ([4, 4] if whole else [6, 6])
        assert_same(engine.greedy(PROMPTS, 20), [answer.first(20) for answer in answers[family]])


def local_experts(worker: Any) -> int:
    """In a worker."""
    modules: nn.Module = worker.get_model()
    return next(m.quant_method.experts.count for m in modules.modules() if isinstance(m, RoutedExperts))


@pytest.mark.parametrize("lazy", [False, True], ids=["compiled", "lazy"])
def test_simulated_card(models: dict[str, Path], answers: dict[str, list[Answer]], lazy: bool, tmp_path: Path) -> None:
    """One graph of each kind of layer for each bucket, and nothing compiled for steps."""
    family = "mixtral" if lazy else "qwen2_moe"
    prompts = PROMPTS[:3]
    graphs = {"warm_up": "skeleton", "skeleton": 2, "max_graphs": 6}
    options = {**TIGHT, "kv_cache_memory_bytes": 4 << 20, "skip_tokenizer_init": True, "max_num_seqs": 4}
    asked = {"ucm": {"graphs": graphs}, "options": options, "prompts": prompts, "max_tokens": 16, "rounds": 2}
    found = run_on_card(serve, tmp_path, lazy=lazy, model=str(models[family]), **asked).result
    expected = [answer.first(16) for answer in answers[family][:3]]
    for round_ in found["rounds"]:
        assert_same([Answer(**answer) for answer in round_], expected)
    assert found["layers"]["ServedMoeRunner"] == (2 if lazy else 1)
    assert found["broken"] == {}
    assert found["remains"] == []
    for count in ("compiled_graphs", "compilations"):
        assert found["card"][count] == found["started"][count], count
    if not lazy:
        # the layer with experts and the one without
        assert found["regions"]["graphs"] <= 2 * (found["regions"]["buckets"] + BEFORE_BUCKETS)
