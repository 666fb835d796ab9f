"""The KV cache as the installed vLLM describes it: groups of layers, and dtypes of our own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig, cache
from vllm.platforms import Platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

from tests.platform.features import save_config, start
from tests.scheduler.schedulers import vllm_config
from tests.vllm_versions import kv_cache_configs
from vllm_gaudi_ucm.attention.backend import UnifiedAttentionBackend
from vllm_gaudi_ucm.attention.latent import LatentAttentionBackend
from vllm_gaudi_ucm.vllm_api.cache_options import FLOAT_KV_DTYPES, float_kv_dtype, register_float_kv_dtypes
from vllm_gaudi_ucm.vllm_api.kv_cache import expected_groups, groups_of, layer_specs

SIZES = {"block_size": 4, "num_kv_heads": 1, "head_size": 8}


def layers(windows: int) -> dict[str, KVCacheSpec]:
    """Two layers with whole contexts, and some with windows."""
    found: dict[str, KVCacheSpec] = {
        f"whole {number}": FullAttentionSpec(**SIZES, dtype=torch.float32) for number in range(2)
    }
    for number in range(windows):
        found[f"window {number}"] = SlidingWindowSpec(**SIZES, dtype=torch.float32, sliding_window=8)
    return found


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    return vllm_config(tmp_path, {})


def names(groups: list[KVCacheGroupSpec]) -> list[list[str]]:
    return [list(group.layer_names) for group in groups]


@pytest.mark.parametrize("windows", [0, 2, 4])
def test_the_groups_are_those_that_the_engine_makes(config: VllmConfig, windows: int) -> None:
    """Whichever module of vLLM makes them."""
    config.cache_config.kv_cache_layout = "LBNHC"  # the engine decides it before it asks for groups
    (made,) = kv_cache_configs(config, [layers(windows)], [1 << 22])
    assert names(groups_of(config, layers(windows))) == names(made.kv_cache_groups)
    assert names(expected_groups(layers(windows))) == names(made.kv_cache_groups)
    assert len(made.kv_cache_groups) == 1 + windows // 2


def test_the_scheduler_knows_the_bytes_of_layers_that_differ(config: VllmConfig) -> None:
    """Its copy of the configuration has the heads of the first layer alone; a store's blocks need them all."""
    config.cache_config.kv_cache_layout = "LBNHC"
    wide = FullAttentionSpec(**{**SIZES, "num_kv_heads": 2, "head_size": 16}, dtype=torch.float32)
    specs = {**layers(0), "wide": wide}
    (made,) = kv_cache_configs(config, [specs], [1 << 22])
    assert layer_specs(made) == specs
    found = layer_specs(generate_scheduler_kv_cache_config([made]))
    assert {name: spec.page_size_bytes for name, spec in found.items()} == {
        name: spec.page_size_bytes for name, spec in specs.items()
    }


def apart() -> type:
    """A platform's builder that gives each layer a group of its own."""
    from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder

    class Apart(DefaultKVCacheConfigBuilder):
        def get_kv_cache_groups(
            self, vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]
        ) -> list[KVCacheGroupSpec]:
            return [KVCacheGroupSpec([name], spec) for name, spec in kv_cache_spec.items()]

    return Apart


@pytest.mark.skipif(
    importlib.util.find_spec("vllm.v1.core.kv_cache_config_builder") is None,
    reason="this vLLM has no builder of KV-cache configurations",
)
def test_the_builder_of_the_platform_is_asked(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Platform, "get_kv_cache_config_builder_cls", lambda *_: f"{__name__}.Apart")
    monkeypatch.setitem(globals(), "Apart", apart())
    assert names(groups_of(config, layers(0))) == [["whole 0"], ["whole 1"]]


def test_a_cache_in_another_float_than_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a name of ours where vLLM refuses its own, and has a hook for it."""
    for _ in range(2):
        register_float_kv_dtypes()
    if not hasattr(cache, "register_kv_cache_dtype"):
        assert float_kv_dtype("bfloat16") == "bfloat16"
        return
    assert float_kv_dtype("bfloat16") == "ucm_bfloat16"
    for name, dtype in FLOAT_KV_DTYPES.items():
        assert STR_DTYPE_TO_TORCH_DTYPE[name] == dtype
        assert get_kv_quant_mode(name) is KVQuantMode.NONE
        assert cache.KV_CACHE_DTYPES.count(name) == 1


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_the_platform_takes_it(name: str, tmp_path: Path) -> None:
    """Up to where a worker would be started."""
    model = save_config(tmp_path, "LlamaForCausalLM", "llama")
    started = start(model, dtype="float32", kv_cache_dtype=float_kv_dtype(name))
    assert started.cache_config.cache_dtype == float_kv_dtype(name)


def test_no_layer_of_a_model_writes_the_cache_before_attention() -> None:
    """vLLM 0.33 hands attention no key where a backend says that it can do without one: ours writes the cache."""
    for one in (UnifiedAttentionBackend, LatentAttentionBackend):
        assert not getattr(one, "supports_kv_cache_update_bypass", False)
