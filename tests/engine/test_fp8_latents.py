"""Latents in 8-bit floats (`--kv-cache-dtype fp8`): the tokens of a float32 cache that holds what they stand for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.connector import file_store, transfer
from tests.engine.families import prompts
from tests.engine.hpu_engine import run_on_hpu
from tests.engine.latent_attention import CHOICE, STATIC
from tests.engine.offloaded_blocks import WatchedEngine
from tests.engine.quantised_models import compressed_tensors, write_quantised
from tests.engine.rounded_cache import STEPS, rounding_engine
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import make_config, make_model
from vllm_gaudi_ucm.attention import latent
from vllm_gaudi_ucm.kv_cache.pair import LatentRows
from vllm_gaudi_ucm.ops.narrow_floats import E4M3

pytestmark = pytest.mark.slow  # starts engines

TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, in_process: None) -> Path:
    return make_model(tmp_path_factory.mktemp("latent"), make_config("deepseek_v2"))


@pytest.fixture(scope="module")
def exact(model: Path) -> list[Answer]:
    """Chunks of prompts beside decodes."""
    with rounding_engine(model) as engine:
        return engine.greedy(prompts(), TOKENS)


def test_answers_and_prefix_hits(model: Path, exact: list[Answer]) -> None:
    """Also of a second round, whose prompts are in the cache; and rounding matters."""
    with Engine(model, kv_cache_dtype="fp8", **STEPS) as engine:
        caches = engine.runner.parts.kv_caches
        assert all(isinstance(cache, LatentRows) for cache in caches.values())
        assert {cache.key.dtype for cache in caches.values()} == {E4M3}
        assert_same(engine.greedy(prompts(), TOKENS), exact)
        again = engine.alone(prompts()[1:3], TOKENS)
        assert all(answer.cached_tokens for answer in again)
        blocks = engine.cached_blocks()[0].shape[0]
        engine.check_idle()
    with rounding_engine(model) as engine:
        engine.greedy(prompts(), TOKENS)
        assert_same(engine.alone(prompts()[1:3], TOKENS), again)
        assert blocks >= 4 * engine.cached_blocks()[0].shape[0] - 4
    with Engine(model, **STEPS) as engine:
        wide = engine.greedy(prompts(), TOKENS)
    assert any(one.logprobs != other.logprobs for one, other in zip(wide, exact, strict=True))


ALL_CHOSEN = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": CHOICE}}
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "buckets": ({"graphs": {**STATIC["graphs"], "recipe_check": "off"}}, {}),
    "the flash kernel": ({"attention": {"implementation": "cpu"}}, {}),
    "all blocks chosen": (ALL_CHOSEN, {}),
    "a slot for each token": ({"kv_cache": {"granularity": "token"}}, {}),
    "two devices": ({"distributed": {"check_ranks": True}}, {"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_beside(name: str, model: Path, exact: list[Answer]) -> None:
    """No answer changes."""
    ucm, options = BESIDE[name]
    with Engine(model, ucm, kv_cache_dtype="fp8", **{**STEPS, **options}) as engine:
        assert_same(engine.greedy(prompts(), TOKENS), exact)


def test_swaps(model: Path) -> None:
    """Steps are cut otherwise, and new tokens of a chunk are not rounded: beside the same cuts."""
    few: dict[str, Any] = {"num_gpu_blocks_override": 40}
    ucm = {"preemption": {"mode": "swap", "host_memory": 4 << 20}}
    with Engine(model, ucm, kv_cache_dtype="fp8", **STEPS, **few) as engine:
        found = engine.greedy(prompts(), 64)
        assert engine.preemptions
        engine.check_idle()
    with rounding_engine(model, ucm=ucm, **few) as engine:
        assert_same(found, engine.greedy(prompts(), 64))


def test_stored_blocks(model: Path, exact: list[Answer], tmp_path: Path) -> None:
    """A second server loads what the first one has computed: the same bytes."""
    found = []
    for _ in range(2):
        config = transfer(file_store(tmp_path))
        with Engine(model, kv_cache_dtype="fp8", kv_transfer_config=config, **STEPS) as engine:
            found.append(engine.alone(prompts()[:3], TOKENS))
            for _ in range(3):
                engine.step()
    assert not found[0][1].cached_tokens
    assert found[1][1].cached_tokens
    with rounding_engine(model) as engine:
        for answers in found:
            assert_same(answers, engine.alone(prompts()[:3], TOKENS))


def test_blocks_leave_and_come_back(model: Path) -> None:
    """Memory mode: what returns is what left."""
    mode = {"enabled": True, "on_device_ratio": 0.4, "refresh_steps": 3, "history_decay": 0.0, "max_missed": 1.0}
    chosen = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {**CHOICE, "sparse_ratio": 0.2}}}
    with Engine(model, {**chosen, "memory_mode": mode}, kv_cache_dtype="fp8", **STEPS) as engine:
        watched = WatchedEngine(engine)
        outputs = watched.generate(prompts(), 60)
        assert watched.offload.totals.released
        assert watched.offload.totals.found
        assert not watched.offload.totals.failed
        engine.check_idle()
    for output in outputs:
        assert all(math.isfinite(one.logprob) for entry in output.outputs[0].logprobs for one in entry.values())


def test_the_scale_of_a_checkpoint(model: Path, tmp_path: Path) -> None:
    """It asks for 8-bit floats by itself, as compressed-tensors writes it; latent and rotary key have one scale."""
    config, choose = compressed_tensors({r".*mlp.*_proj": "fp8 per channel"})
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    quantised, meant = write_quantised(model, tmp_path, {**config, "kv_cache_scheme": scheme}, choose)
    tensors = load_file(quantised / "model.safetensors")
    scale = 0.3
    for layer in range(2):
        for name in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with Engine(quantised, **STEPS) as engine:
        assert {blocks.dtype for blocks in engine.cached_blocks()} == {E4M3}
        layers = [one for one in engine.runner.decoder.model.modules() if isinstance(one, latent.LatentAttention)]
        assert [float(layer._k_scale) for layer in layers] == pytest.approx([scale] * 2)
        found = engine.greedy(prompts()[:4], 8)
    with rounding_engine(meant, scale) as engine:
        assert_same(found, engine.greedy(prompts()[:4], 8))


def test_on_the_card(model: Path, exact: list[Answer], tmp_path: Path) -> None:
    """In compiled regions of the simulated card, whose 8-bit floats end at 240."""
    graphs = {"warm_up": "skeleton", "skeleton": 1, "max_graphs": 4}
    options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 20, "dtype": "float32", **STEPS}
    run = run_on_hpu(model, tmp_path, {"graphs": graphs}, 1, prompts()[:4], kv_cache_dtype="fp8", **options)
    with rounding_engine(model) as engine:
        expected = engine.greedy(prompts()[:4], 8)
    assert_same(run.rounds[0], expected)
    assert run.broken == {}
    assert "2 layers of DeepseekV2ForCausalLM are one compiled region" in run.log
