"""Models whose rows choose tokens by themselves (DSA) give the tokens of Transformers beyond the tokens that a row may
choose, however steps are cut and padded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.connector import file_store, transfer
from tests.engine.families import prompts
from tests.engine.latent_attention import STATIC, check_on_card
from tests.engine.reference_model import ReferenceModel
from tests.engine.rounded_cache import STEPS, rounding_engine
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import make_config, make_model
from tests.observability.exposition import scrape
from vllm_gaudi_ucm.kv_cache.pair import IndexedLatents, LatentRows
from vllm_gaudi_ucm.observability.metrics_file import metrics_folder
from vllm_gaudi_ucm.ops.narrow_floats import E4M3
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

pytestmark = pytest.mark.slow  # starts engines

TOKENS, CHOSEN = 32, 24
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
# a token whose score is near another's may be chosen in its place
NEAR = 0.02
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def _make(folder: Path, family: str, **changes: Any) -> Path:
    return make_model(folder, make_config(family, index_topk=CHOSEN, index_n_heads=8, **changes))


def _reference(model: Path, family: str, chosen: int | None = None) -> ReferenceModel:
    kind = {"deepseek_v32": transformers.DeepseekV32ForCausalLM, "glm_moe_dsa": transformers.GlmMoeDsaForCausalLM}
    reference = ReferenceModel(model, kind=kind[family])
    for module in reference.model.modules():
        if chosen is not None and hasattr(module, "index_topk"):
            module.index_topk = chosen
    return reference


def _chosen(engine: Engine) -> dict[str, float]:
    """Returns the counts of steps and rows on /metrics."""
    samples = scrape(metrics_folder(engine.llm.llm_engine.vllm_config.instance_id))
    return {of: samples.get(f'gaudi_ucm_chosen_token_{of}_total{{engine="0"}}', 0) for of in ("steps", "rows")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, in_process: None) -> Path:
    return _make(tmp_path_factory.mktemp("chosen"), "deepseek_v32")


@pytest.fixture(scope="module")
def answers(model: Path) -> list[Answer]:
    """Chunks of prompts with decodes, and hits in the prefix cache."""
    with Engine(model, **CHUNKS) as engine:
        caches = engine.runner.parts.kv_caches
        assert all(isinstance(cache, IndexedLatents) for cache in caches.values())
        found = engine.greedy(prompts(), TOKENS)
        engine.check_idle()
        # the last token of an answer is not computed
        lengths = [len(prompt) + TOKENS - 1 for prompt in prompts()]
        expected = sum(n - max(a.cached_tokens, CHOSEN) for n, a in zip(lengths, found, strict=True) if n > CHOSEN)
        assert _chosen(engine)["rows"] == expected
        again = engine.alone(prompts()[1:3], TOKENS)
        assert all(answer.cached_tokens for answer in again)
        assert_same(again, found[1:3])
    _reference(model, "deepseek_v32").assert_greedy(prompts(), found, near=NEAR)
    return found


def test_dense_attention_gives_other_tokens(model: Path, answers: list[Answer]) -> None:
    with pytest.raises(AssertionError):
        _reference(model, "deepseek_v32", chosen=4096).assert_greedy(prompts(), answers, near=NEAR)


BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "buckets and drafts": (STATIC, {**CHUNKS, "speculative_config": NGRAM}),
    "whole prompts, preempted": ({}, {"num_gpu_blocks_override": 34, "enable_prefix_caching": False}),
    "swaps": ({"preemption": {"mode": "swap", "host_memory": 4 << 20}}, {**CHUNKS, "num_gpu_blocks_override": 34}),
    "partial hits and compaction": ({"kv_cache": {"partial_hits": True, "compaction": True}}, CHUNKS),
    "two devices": ({"distributed": {"check_ranks": True}}, {**CHUNKS, "tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_beside(name: str, model: Path, answers: list[Answer]) -> None:
    """No answer changes."""
    ucm, options = BESIDE[name]
    with Engine(model, ucm, **options) as engine:
        assert_same(engine.greedy(prompts(), TOKENS), answers)
        counts = _chosen(engine)
        assert counts["rows"] > counts["steps"] > 0
        assert engine.preemptions or "num_gpu_blocks_override" not in options


def test_latents_in_8_bit_floats(model: Path, answers: list[Answer]) -> None:
    """The tokens of a float32 cache that holds what they stand for; keys of the indexer are not rounded."""
    with rounding_engine(model) as engine:
        exact = engine.greedy(prompts(), TOKENS)
    with Engine(model, kv_cache_dtype="fp8", **STEPS) as engine:
        kinds = {(one.key.dtype, one.index_key.dtype) for one in engine.runner.parts.kv_caches.values()}
        assert kinds == {(E4M3, torch.float32)}
        assert_same(engine.greedy(prompts(), TOKENS), exact)
    assert any(one.logprobs != other.logprobs for one, other in zip(answers, exact, strict=True))


def test_stored_blocks(model: Path, answers: list[Answer], tmp_path: Path) -> None:
    """A second server loads what the first one has computed: latents, and keys of the indexer."""
    for number in range(2):
        with Engine(model, kv_transfer_config=transfer(file_store(tmp_path)), **CHUNKS) as engine:
            found = engine.greedy(prompts(), TOKENS)
            for _ in range(3):
                engine.step()
        assert_same(found, answers)
        assert bool(found[1].cached_tokens) == bool(number)


def test_layers_share_choices(tmp_path: Path, in_process: None) -> None:
    """GLM-5's second layer takes the choices of the first one, and keeps no keys of an indexer."""
    model = _make(tmp_path, "glm_moe_dsa", indexer_types=["full", "shared"])
    assert "index_topk_freq" not in json.loads((model / "config.json").read_text())
    for ucm in ({}, STATIC):
        with Engine(model, ucm, **CHUNKS) as engine:
            kinds = [type(cache) for cache in engine.runner.parts.kv_caches.values()]
            assert kinds == [IndexedLatents, LatentRows]
            found = engine.greedy(prompts(), TOKENS)
        _reference(model, "glm_moe_dsa").assert_greedy(prompts(), found, near=NEAR)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a sparse method": ({"ucm_sparse_method": "GSA"}, {}),
    "a slot for each token": ({"kv_cache": {"granularity": "token"}}, {}),
    "the KV connector OffloadingConnector": ({}, {"kv_offloading_size": 0.01, "kv_offloading_backend": "native"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, model: Path) -> None:
    """By name, unless no context is longer than what a row chooses."""
    ucm, options = REFUSED[name]
    with pytest.raises(UnsupportedFeatureError, match=f"{name} with a model that chooses {CHOSEN} tokens for each row"):
        Engine(model, ucm, **options).__enter__()


def test_short_contexts_are_dense(model: Path) -> None:
    """There is no indexer then, and no cache of its keys."""
    with Engine(model, max_model_len=CHOSEN) as engine:
        assert all(isinstance(cache, LatentRows) for cache in engine.runner.parts.kv_caches.values())
        assert not any(_chosen(engine).values())
        found = engine.greedy([prompts()[1][:10]], 8)
    _reference(model, "deepseek_v32").assert_greedy([prompts()[1][:10]], found)


def test_on_the_card(model: Path, answers: list[Answer], tmp_path: Path) -> None:
    """Through torch.compile, the default there; the simulated card checks what a graph may write."""
    run = check_on_card(model, answers, tmp_path)
    assert "each row attends to the 24 tokens that it chooses" in run.log
    assert run.card["compilations"] == run.started["compilations"]
