"""Attention backends: `vllm.v1.attention`.

Extension point: a platform plugin brings a backend of its own. `AttentionBackend`, `AttentionImpl`,
`AttentionMetadata` and `AttentionMetadataBuilder` are its classes; `AttentionBackendEnum`, `AttentionLayer`,
`AttentionSelectorConfig`, `AttentionType` and `MultipleOf` are types of their methods. Its layer of multi-head latent
attention is a plugin's to replace: `MultiHeadLatentAttentionWrapper`, a `PluggableLayer`, built of `MLAModules`.
Internal: `get_attn_backend`, through which a layer finds its backend; `split_kv_b_proj`; `_init_kv_cache_quant`, which
gives a layer the scales of its cache; the name that `ChunkedLocalAttention` gives its backend.
"""

import re

import torch
from torch import nn
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.attention.attention import _init_kv_cache_quant as add_cache_scales
from vllm.model_executor.layers.attention.mla_attention import split_kv_b_proj
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig, get_attn_backend

__all__ = [
    "AttentionBackend",
    "AttentionBackendEnum",
    "AttentionImpl",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionSelectorConfig",
    "AttentionType",
    "MLAModules",
    "MultiHeadLatentAttentionWrapper",
    "MultipleOf",
    "PluggableLayer",
    "add_cache_scales",
    "asks_for_narrow_cache",
    "chunk_of",
    "get_attn_backend",
    "take_kv_b_proj",
]


def chunk_of(backend: type[AttentionBackend]) -> int | None:
    """Returns the tokens of a chunk for a layer whose rows see only their own chunk; None for a layer without chunks.

    Reason: `ChunkedLocalAttention` tells neither its backend nor its implementation how long chunks are. It makes a
    class of each backend and length, which has the length in its name.
    Remove when: implementations are given the length, like the length of a sliding window.
    """
    found = re.fullmatch(r"ChunkedLocalAttention_(\d+)_.*", backend.__name__)
    return None if found is None else int(found[1])


def asks_for_narrow_cache(quant_config: object) -> bool:
    """True if a checkpoint asks for a KV cache of 8-bit floats.

    Reason: only `CompressedTensorsConfig` tells it, and vLLM's `Attention` reads it when a layer is made.
    Remove when: `CacheConfig.cache_dtype` has the answer before a model is made.
    """
    return getattr(quant_config, "kv_cache_scheme", None) is not None


def take_kv_b_proj(
    projection: nn.Module, dtype: torch.dtype, latent: int, heads: int, nope: int, value: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights that make keys [heads, nope, latent] and values [heads, value, latent] from latents. The
    layer's own weight is freed, because both are copies of it.

    Raises LookupError for a weight that stays quantised, which cannot be read as a matrix here.

    Reason: `MLAAttention` of vLLM keeps the layer's weight in addition to the two that it makes of it.
    Remove when: a model hands the two to its attention.
    """
    if not isinstance(projection.quant_method, UnquantizedLinearMethod):
        raise LookupError(
            "quantised weights of kv_b_proj, of multi-head latent attention (leave it out when you quantise)"
        )
    uk, uv = split_kv_b_proj(projection, dtype, latent, heads, nope, value)
    uk, uv = (weight.permute(1, 2, 0).contiguous() for weight in (uk, uv))
    weight = dict(projection.named_parameters(recurse=False)).get("weight")
    if weight is not None:
        weight.data = weight.new_empty(0)
    return uk, uv
