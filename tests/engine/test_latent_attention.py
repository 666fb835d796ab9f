"""Multi-head latent attention (DeepSeek) gives the tokens of Transformers, however steps are cut and padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.connector import file_store, transfer
from tests.engine.families import prompts
from tests.engine.latent_attention import CHOICE, STATIC, check_on_card
from tests.engine.offloaded_blocks import WatchedEngine
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import LATENT_EXPERTS, make_config, make_model
from vllm_gaudi_ucm.attention.groups import GroupStep
from vllm_gaudi_ucm.attention.latent import LatentAttentionImpl, LatentSizes
from vllm_gaudi_ucm.kv_cache.pair import LatentRows
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalPart, CausalSlice, UniquePart
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.attention import take_kv_b_proj

pytestmark = pytest.mark.slow  # starts engines

# what is preempted needs room for answers; what is not, more than a block of them
TOKENS, LONGER = 64, 20
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 0.6,
    "original_max_position_embeddings": 128,
    "rope_theta": 10000.0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, in_process: None) -> Path:
    """With a latent of queries, too."""
    return make_model(tmp_path_factory.mktemp("latent"), make_config("deepseek_v2", q_lora_rank=20))


@pytest.fixture(scope="module")
def answers(model: Path) -> list[Answer]:
    """Chunks of prompts beside decodes, checked against Transformers."""
    with Engine(model, max_num_batched_tokens=64, max_num_seqs=4) as engine:
        caches = engine.runner.parts.kv_caches
        assert all(isinstance(cache, LatentRows) for cache in caches.values())
        # a latent and a rotary key per token, whatever the number of heads
        assert {blocks.shape[1:] for blocks in engine.cached_blocks()} == {(16, 1, 24 + 8)}
        found = engine.greedy(prompts(), TOKENS)
        engine.check_idle()
        again = engine.alone(prompts()[1:3], LONGER)
        assert all(answer.cached_tokens for answer in again)
        assert_same(again, [answer.first(LONGER) for answer in found[1:3]])
    ReferenceModel(model).assert_greedy(prompts(), found)
    return found


def test_chunks_and_prefix_hits(answers: list[Answer]) -> None:
    assert all(len(answer.tokens) == TOKENS for answer in answers)


def test_prompts_alone(model: Path, answers: list[Answer]) -> None:
    """Whole prompts, which read no cached block, and decodes behind them; preempted where the cache is too small."""
    with Engine(model, num_gpu_blocks_override=40, enable_prefix_caching=False) as engine:
        assert_same(engine.greedy(prompts(), TOKENS), answers)
        assert engine.preemptions
        engine.check_idle()


PROMPTS = {"prompt_ratio": 1.0, "prompt_tile": 16}
NARROW = {**CHOICE, "summary_dtype": "fp8"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "buckets": (STATIC, {}),
    "cpu": ({"attention": {"implementation": "cpu"}}, {}),
    "drafts": ({}, {"speculative_config": NGRAM}),
    "all blocks chosen": ({"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {**CHOICE, **PROMPTS}}}, {}),
    "8-bit summaries": ({"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": NARROW}}, {}),
    "swaps": ({"preemption": {"mode": "swap", "host_memory": 4 << 20}}, {"num_gpu_blocks_override": 40}),
    "a slot for each token": ({"kv_cache": {"granularity": "token"}}, {}),
    "partial hits and compaction": ({"kv_cache": {"partial_hits": True, "compaction": True}}, {}),
    "two devices": ({"distributed": {"check_ranks": True}}, {"tensor_parallel_size": 2}),
    "offloading connector": ({}, {"kv_offloading_size": 0.01, "kv_offloading_backend": "native"}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_beside(name: str, model: Path, answers: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer changes."""
    ucm, options = BESIDE[name]
    divided = []
    divides = LatentSizes.divides
    monkeypatch.setattr(LatentSizes, "divides", lambda *args: divided.append(divides(*args)) or divided[-1])
    count = TOKENS if name == "swaps" else LONGER
    with Engine(model, ucm, **{"max_num_batched_tokens": 64, "max_num_seqs": 4, **options}) as engine:
        assert_same(engine.greedy(prompts(), count), [answer.first(count) for answer in answers])
    # in this process chunks of prompts have keys of their own
    assert any(divided) or options.get("tensor_parallel_size") or "ucm_sparse_method" in ucm


def test_stored_blocks(model: Path, answers: list[Answer], tmp_path: Path) -> None:
    """A second server loads what the first one has computed."""
    for number in range(2):
        config = transfer(file_store(tmp_path))
        with Engine(model, kv_transfer_config=config, max_num_batched_tokens=64, max_num_seqs=4) as engine:
            found = engine.greedy(prompts(), LONGER)
            for _ in range(3):
                engine.step()
        assert_same(found, [answer.first(LONGER) for answer in answers])
        assert bool(found[1].cached_tokens) == bool(number)


def test_static_shapes_choose_what_true_shapes_choose(model: Path, answers: list[Answer]) -> None:
    found = []
    for graphs in ({}, {"graphs": {**STATIC["graphs"], "max_graphs": 2}}):
        few = {**CHOICE, **PROMPTS, "sparse_ratio": 0.4, "prompt_ratio": 0.5}
        ucm = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": few}, **graphs}
        with Engine(model, ucm, max_model_len=256, max_num_batched_tokens=64, max_num_seqs=4) as engine:
            found.append(engine.greedy(prompts()[1:4], 24))
    assert_same(found[1], found[0])
    assert any(one.tokens != other.tokens[:24] for one, other in zip(found[0], answers[1:4], strict=True))


def test_blocks_leave_and_come_back(model: Path) -> None:
    """Memory mode: what returns is what left."""
    mode = {"enabled": True, "on_device_ratio": 0.4, "refresh_steps": 3, "history_decay": 0.0, "max_missed": 1.0}
    ucm = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {**CHOICE, "sparse_ratio": 0.2}}}
    with Engine(model, {**ucm, "memory_mode": mode}, max_num_batched_tokens=64, max_num_seqs=4) as engine:
        watched = WatchedEngine(engine)
        watched.generate(prompts(), 60)
        assert watched.offload.totals.released
        assert watched.offload.totals.found
        assert not watched.offload.totals.failed
        engine.check_idle()


def test_new_tokens_have_keys_of_their_own_where_they_are_many() -> None:
    """DeepSeek V3's sizes: making keys and values of 512 elements for each of 128 heads costs some 340 pairs."""
    sizes, block = LatentSizes(128, 512, 64, 128, 128), torch.zeros(1, dtype=torch.int64)
    cached = UniquePart(block, block, block.int(), block.int(), 1)
    for rows, many in ((8, False), (256, False), (1024, True)):
        causal = CausalPart(torch.zeros(rows, dtype=torch.int32), (CausalSlice(0, rows, 0, rows),))
        assert sizes.divides(AttentionParts(causal, unique=cached)) == many
        assert not sizes.divides(AttentionParts(causal))
    assert not sizes.divides(AttentionParts(unique=cached))


def test_on_the_card(model: Path, answers: list[Answer], tmp_path: Path) -> None:
    """Through torch.compile, the default there; the simulated card checks what a graph may write."""
    run = check_on_card(model, answers, tmp_path)
    assert "2 layers of DeepseekV2ForCausalLM are one compiled region" in run.log


def test_experts(tmp_path: Path) -> None:
    """As DeepSeek V2 has them."""
    model = make_model(tmp_path, make_config("deepseek_v2", **LATENT_EXPERTS))
    for ucm in ({}, STATIC):
        with Engine(model, ucm, max_num_batched_tokens=64, max_num_seqs=4) as engine:
            found = engine.greedy(prompts(), 16)
        ReferenceModel(model).assert_greedy(prompts(), found)


def test_what_latents_are_not_kept_with(model: Path) -> None:
    """Each by its name."""
    with pytest.raises(UnsupportedFeatureError, match=r"a KV cache of another dtype with multi-head latent attention"):
        Engine(model, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"]).__enter__()
    layer = LatentAttentionImpl(LatentSizes(4, 24, 8, 16, 8), 1.0, "auto")
    layer.join(None)
    with pytest.raises(UnsupportedFeatureError, match=r"several KV-cache groups with multi-head latent attention"):
        layer.join(GroupStep())
    projection = nn.Module()
    projection.quant_method = object()
    with pytest.raises(LookupError, match=r"quantised weights of kv_b_proj"):
        take_kv_b_proj(projection, torch.float32, 24, 4, 16, 8)


def test_positions_of_yarn(tmp_path: Path) -> None:
    """They scale the scores, too."""
    model = make_model(tmp_path, make_config("deepseek_v2", rope_parameters=dict(YARN)))
    with Engine(model, max_num_batched_tokens=64, max_num_seqs=4) as engine:
        found = engine.greedy(prompts(), 16)
    ReferenceModel(model).assert_greedy(prompts(), found)
