"""The attention layers of a model: what they need of the KV cache, and giving them their part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.vllm_api.model import AttentionLayerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheSpec


def attention_layers(vllm_config: VllmConfig) -> dict[str, AttentionLayerBase]:
    """The layers by name; they register themselves when the model is built."""
    context = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if isinstance(layer, AttentionLayerBase)}


def kv_cache_specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """What each layer keeps per block."""
    specs = {name: layer.get_kv_cache_spec(vllm_config) for name, layer in attention_layers(vllm_config).items()}
    return {name: spec for name, spec in specs.items() if spec is not None}


def bind_kv_caches(vllm_config: VllmConfig, caches: Mapping[str, torch.Tensor]) -> None:
    """Gives each layer its cache [blocks, kv heads, block size, k | v]."""
    layers = attention_layers(vllm_config)
    for name, cache in caches.items():
        layers[name].bind_kv_cache(cache)
