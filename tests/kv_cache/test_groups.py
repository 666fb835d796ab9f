"""Layers of several KV-cache groups: which share memory, and how much of it a model with windows takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
)

from tests.engine.tiny_models import make_config
from tests.vllm_versions import kv_cache_configs
from vllm_gaudi_ucm.kv_cache.allocation import allocate_kv_cache
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.kv_cache import keep_split_chunks, keep_whole_contexts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder = tmp_path_factory.mktemp("model")
    found = vllm_config(folder, 131072)
    # the engine decides it before it asks for groups
    found.cache_config.kv_cache_layout = "LBNHC"
    return found


def vllm_config(folder: Path, max_model_len: int) -> VllmConfig:
    config = make_config("llama", max_position_embeddings=max_model_len)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    options = {"max_num_batched_tokens": 8192, "max_num_seqs": 64, "block_size": 128}
    return EngineArgs(
        str(folder), max_model_len=max_model_len, skip_tokenizer_init=True, **options
    ).create_engine_config()


def specs(full: int, windows: int, heads: int = 2, size: int = 8, window_heads: int = 2) -> dict[str, KVCacheSpec]:
    """Layers as a 5:1 model has them: windows first."""
    shape = {"block_size": 128, "head_size": size, "dtype": torch.bfloat16}
    of_window = {
        f"w{i}": SlidingWindowSpec(num_kv_heads=window_heads, sliding_window=1024, **shape) for i in range(windows)
    }
    return {**of_window, **{f"f{i}": FullAttentionSpec(num_kv_heads=heads, **shape) for i in range(full)}}


def configured(server: VllmConfig, layers: dict[str, KVCacheSpec], gib: float) -> KVCacheConfig:
    (config,) = kv_cache_configs(server, [layers], [int(gib * 2**30)])
    return config


def test_windows_take_a_quarter_of_the_memory_at_most(server: VllmConfig) -> None:
    """Five layers of windows for each with full attention, prompts in chunks of 8K tokens, 128K tokens of context."""
    layers = specs(6, 30)
    found = get_max_concurrency_for_kv_cache_config(server, configured(server, layers, 1))
    whole = get_max_concurrency_for_kv_cache_config(server, configured(server, keep_whole_contexts(layers, 128), 1))
    assert whole / found <= 0.25


def test_layers_of_different_groups_share_memory(server: VllmConfig) -> None:
    config = configured(server, specs(2, 4), 0.1)
    assert [len(group.layer_names) for group in config.kv_cache_groups] == [2, 2, 2]
    caches = allocate_kv_cache(config, CPU)
    for layers in zip(*(group.layer_names for group in config.kv_cache_groups), strict=True):
        assert len({id(caches[name]) for name in layers}) == 1
    distinct = {rows.data_ptr(): rows for pair in caches.values() for rows in pair}
    assert len(distinct) == 4
    taken = sum(rows.nbytes for rows in distinct.values())
    assert taken == config.kv_cache_tensors[0].size


def test_without_the_hybrid_manager_each_layer_has_its_own(server: VllmConfig) -> None:
    config = configured(server, keep_whole_contexts(specs(2, 4), 128), 0.1)
    assert len(config.kv_cache_groups) == 1
    caches = allocate_kv_cache(config, CPU)
    assert len({rows.data_ptr() for pair in caches.values() for rows in pair}) == 12


@pytest.mark.parametrize(("chunk", "groups"), [(8192, 4), (1000, 1), (64, 1)])
def test_chunks_of_whole_blocks_are_given_back(server: VllmConfig, chunk: int, groups: int) -> None:
    shape = {"block_size": 128, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    layers = {f"c{i}": ChunkedLocalAttentionSpec(attention_chunk_size=chunk, **shape) for i in range(6)}
    layers |= {f"f{i}": FullAttentionSpec(**shape) for i in range(2)}
    assert len(configured(server, keep_split_chunks(layers), 0.1).kv_cache_groups) == groups
    whole = keep_whole_contexts(layers, 128)
    assert whole["c0"] == FullAttentionSpec(attention_chunk_size=chunk, **shape)
    assert len(configured(server, whole, 0.1).kv_cache_groups) == 1


def test_layers_of_other_shapes_cannot_share_memory(server: VllmConfig) -> None:
    config = configured(server, specs(2, 2, window_heads=1), 0.1)
    with pytest.raises(UnsupportedFeatureError, match=r"differ in shape.*--disable-hybrid-kv-cache-manager"):
        allocate_kv_cache(config, CPU)
