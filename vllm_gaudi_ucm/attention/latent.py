"""Multi-head latent attention (DeepSeek): the layer with the cache.

The cache has one row per token: the latent and the rotary key, shared by all heads. With `uk` absorbed into queries and
`uv` applied to results, attention over the cache has one KV head whose values are part of its keys, so parts, buckets
and merges are the same as for every other model. Attention of many new tokens among themselves uses the keys and values
of each head, which takes a third of the work; its results are merged with those over the cache by the logarithms of the
sums. Source: DeepSeek-V2, arXiv 2405.04434, 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionBackend, UnifiedAttentionImpl, UnifiedAttentionMetadata
from vllm_gaudi_ucm.attention.cache_scales import CacheScales
from vllm_gaudi_ucm.attention.indexer import write_index_keys
from vllm_gaudi_ucm.kv_cache.pair import IndexedLatents, LatentRows, in_blocks
from vllm_gaudi_ucm.ops.chosen_tokens.api import attend_tokens, choose_tokens
from vllm_gaudi_ucm.ops.chosen_tokens.implementation import IndexRows, TokenPlaces
from vllm_gaudi_ucm.ops.kv_cache.api import write_rows
from vllm_gaudi_ucm.ops.narrow_floats import E4M3, narrow
from vllm_gaudi_ucm.ops.unified_attention.api import PreparedParts, unified_attention
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.attention import (
    AttentionBackend,
    add_cache_scales,
    asks_for_narrow_cache,
    get_attn_backend,
    take_kv_b_proj,
)
from vllm_gaudi_ucm.vllm_api.cache_options import FLOAT_KV_DTYPES
from vllm_gaudi_ucm.vllm_api.kv_cache import IndexedLatentSpec, KVCacheSpec, MLAAttentionSpec
from vllm_gaudi_ucm.vllm_api.model import (
    AttentionLayerBase,
    get_forward_context,
)

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig

    from vllm_gaudi_ucm.attention.groups import GroupStep
    from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts


@dataclass(frozen=True)
class LatentSizes:
    """Sizes for one token and head, in elements.

    heads: heads on this device. latent: size of a latent. rotary, nope: rotary and other elements of a key. value: size
    of a value. chosen: most tokens that each row attends to, chosen by the model's indexer (DSA); 0: all of them.
    """

    heads: int
    latent: int
    rotary: int
    nope: int
    value: int
    chosen: int = 0

    @property
    def cached(self) -> int:
        return self.latent + self.rotary

    def divides(self, parts: AttentionParts) -> bool:
        """Returns whether new tokens of a step with cached blocks get keys and values of their own, because making
        these costs less than they save.
        """
        if self.chosen or parts.causal is None or parts.selected is not None or not _reads_cache(parts):
            return False
        pairs = 0
        for one in parts.causal.slices:
            rows = one.query_hi - one.query_lo
            # a slice sees half of its own rows, which are the last of its keys
            pairs += rows * (one.key_hi - one.key_lo) - rows * (rows - 1) // 2
        saved = self.cached + self.latent - (self.nope + self.rotary + self.value)
        return pairs * saved > parts.causal.groups.shape[0] * self.latent * (self.nope + self.value)


BESIDE_LATENTS = "with multi-head latent attention"


class LatentAttentionBackend(UnifiedAttentionBackend):
    """The same backend for layers with one cache row per token."""

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def get_impl_cls(cls) -> type[LatentAttentionImpl]:
        return LatentAttentionImpl


class LatentAttentionImpl(UnifiedAttentionImpl):
    """Computes the attention of one latent layer, between its projections."""

    def __init__(self, sizes: LatentSizes, scale: float, kv_cache_dtype: str) -> None:
        super().__init__(sizes.heads, sizes.cached, scale, num_kv_heads=1, kv_cache_dtype=kv_cache_dtype)
        self.sizes = sizes
        # first the spec with the keys and values of each head, then the spec over the cache
        self._of_heads = self.spec
        self.spec = replace(self.spec, values_in_keys=True)
        self.shares_choices = False
        self.choices = torch.empty((0, 0), dtype=torch.int32)

    def share_choices(self, choices: torch.Tensor) -> None:
        """Makes a layer with an indexer write its choices for the next layers, and a layer without one read them.

        choices: int32 [rows of the largest step, chosen].
        """
        self.shares_choices, self.choices = True, choices

    def join(self, group: GroupStep | None) -> None:
        """Refuses several groups, which windows in other layers of the model would cause."""
        if group is not None:
            raise UnsupportedFeatureError(f"several KV-cache groups {BESIDE_LATENTS}", "the model")

    def attend(
        self,
        layer: LatentAttention,
        query: torch.Tensor,
        latent: torch.Tensor,
        rotary: torch.Tensor,
        weights: LatentWeights,
        kv_cache: LatentRows | IndexedLatents,
        attn_metadata: UnifiedAttentionMetadata | None,
        index: IndexRows | None = None,
    ) -> torch.Tensor:
        """Returns [rows, heads * value size]. query: [rows, heads, nope + rotary]; latent: [rows, latent size]; rotary:
        [rows, 1, rotary size], with positions applied. Without metadata (in a memory measurement) attention is skipped.

        Over a cache of 8-bit floats, absorbed attention is computed in the cache's units. New tokens with keys and
        values of their own are not rounded; their sums are over the same scores.

        index: of a layer with an indexer. A step in which no row sees more tokens than it may choose is dense.
        """
        sizes, rows = self.sizes, query.shape[0]
        if attn_metadata is None:
            return query.new_zeros((rows, sizes.heads * sizes.value))
        key, scales = torch.cat((latent[:, None], rotary), -1), None
        if kv_cache.key.dtype == E4M3:
            scales = CacheScales.of_latents(layer, query.dtype)
            key = key / scales.key
        rounded = key if scales is None else narrow(key)
        written = LatentRows(write_rows(rounded, kv_cache.key, attn_metadata.slots))
        parts = attn_metadata.parts
        chosen = self._chosen(kv_cache, attn_metadata, index) if sizes.chosen else None
        if chosen is not None:
            absorbed = weights.absorb(query, sizes.nope)
            if scales is not None:
                absorbed = absorbed * scales.key
            found = attend_tokens(absorbed, written.key[:, 0], chosen, self.scale, sizes.latent)
            return weights.values(found if scales is None else found * scales.value)
        if attn_metadata.sparse is None and not _reads_cache(parts.parts):
            return self._attend_expanded(query, latent, rotary, weights, parts).flatten(1)
        cache = in_blocks(written, attn_metadata.parts.block_size).key
        absorbed = weights.absorb(query, sizes.nope)
        if scales is not None:
            absorbed = absorbed * scales.key
        found = absorbed.new_empty((rows, sizes.heads, sizes.latent))
        values, cached_values = key[..., : sizes.latent], cache[..., : sizes.latent]
        tensors = (absorbed, key, values, cache, cached_values)
        if attn_metadata.new_tokens is None:
            found = self._attend(*tensors, attn_metadata, found)
            return weights.values(found if scales is None else found * scales.value)
        of_cached, of_new = (query.new_empty((rows, sizes.heads), dtype=torch.float32) for _ in range(2))
        unified_attention(*tensors, parts, self.spec, found, log_sums=of_cached)
        new = self._attend_expanded(query, latent, rotary, weights, attn_metadata.new_tokens, of_new)
        if scales is not None:
            found = found * scales.value
        share = torch.softmax(torch.stack((of_cached, of_new)), 0)[..., None]
        return (weights.values(found).view(new.shape) * share[0] + new * share[1]).to(query.dtype).flatten(1)

    def _chosen(
        self, kv_cache: LatentRows | IndexedLatents, attn_metadata: UnifiedAttentionMetadata, index: IndexRows | None
    ) -> torch.Tensor | None:
        """Returns [rows, chosen] slots of the tokens that rows attend to; None if they attend to all. Writes the new
        keys of the indexer in any case.
        """
        parts, count = attn_metadata.parts.parts, self.sizes.chosen
        all_seen = not attn_metadata.chooses
        rows = len(attn_metadata.slots)
        if index is None:
            # of the last layer with an indexer
            return None if all_seen else self.choices[:rows, :count]
        assert isinstance(kv_cache, IndexedLatents)
        keys = write_index_keys(index, kv_cache.index_key, attn_metadata.slots)
        if all_seen:
            return None
        places = TokenPlaces(parts, attn_metadata.slots, attn_metadata.parts.block_size)
        found = choose_tokens(index, keys, places, count)
        if self.shares_choices:
            numbers = torch.arange(rows, device=found.device)
            self.choices.index_copy_(0, numbers, functional.pad(found, (0, self.choices.shape[1] - count)).int())
        return found

    def _attend_expanded(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        rotary: torch.Tensor,
        weights: LatentWeights,
        parts: PreparedParts,
        log_sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns [rows, heads, value]: attention of new tokens among themselves, with the keys and values of each
        head. Reads no cached block. log_sums: see `unified_attention`.
        """
        key, value = weights.expand(latent, rotary)
        no_keys, no_values = (one.new_empty((0, parts.block_size, *one.shape[1:])) for one in (key, value))
        return unified_attention(
            query, key, value, no_keys, value_cache=no_values, parts=parts, spec=self._of_heads, log_sums=log_sums
        )


def _reads_cache(parts: AttentionParts) -> bool:
    return parts.shared is not None or parts.unique is not None or parts.selected is not None


class LatentWeights(nn.Module):
    """Weights that make keys and values from latents, for each head.

    Args:
        uk: [heads, nope, latent], without gaps.
        uv: [heads, value, latent].
    """

    def __init__(self, uk: torch.Tensor, uv: torch.Tensor) -> None:
        super().__init__()
        self.uk, self.uv = (nn.Parameter(weight, requires_grad=False) for weight in (uk, uv))

    def absorb(self, query: torch.Tensor, nope: int) -> torch.Tensor:
        """Returns [rows, heads, latent + rotary] for a query [rows, heads, nope + rotary]. The product of the result
        with a row of the cache equals the product of the query with the head's key.
        """
        absorbed = torch.bmm(query[..., :nope].transpose(0, 1), self.uk).transpose(0, 1)
        return torch.cat((absorbed, query[..., nope:]), -1)

    def expand(self, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys [rows, heads, nope + rotary] and values [rows, heads, value] from latents and rotary keys."""
        heads, both = self.uk.shape[0], (self.uk, self.uv)
        key, value = (nn.functional.linear(latent, one.flatten(0, 1)).unflatten(1, (heads, -1)) for one in both)
        return torch.cat((key, rotary.expand(-1, heads, -1)), -1), value

    def values(self, found: torch.Tensor) -> torch.Tensor:
        """Returns [rows, heads * value] from weighted sums of latents [rows, heads, latent]."""
        return torch.bmm(found.transpose(0, 1), self.uv.transpose(1, 2)).transpose(0, 1).flatten(1)


class LatentAttention(nn.Module, AttentionLayerBase):
    """The layer with the cache: takes queries, latents and rotary keys of a step, and returns the results of each head.

    Its forward uses no layer name, so all layers of a model are one region; see `NamelessAttention`.

    Args:
        projection: `kv_b_proj`, from latents to keys and values; its weight moves to this layer once it is loaded.
        quant_config: the model's, which has the scale of a cache of 8-bit floats; if None, the scale is 1.
        index_size: elements of a key of the layer's indexer; 0 without one.
    """

    weights: LatentWeights
    _k_scale: torch.Tensor

    def __init__(
        self,
        sizes: LatentSizes,
        scale: float,
        projection: nn.Module,
        vllm_config: VllmConfig,
        cache_config: CacheConfig | None,
        quant_config: Any,
        prefix: str,
        index_size: int = 0,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.index_size = index_size
        self.num_kv_heads = 1
        self.layer_name = prefix
        self.kv_cache: Any = torch.tensor([])
        self.kv_cache_dtype = _cache_dtype(cache_config, quant_config)
        self._projection = [projection]  # in a list, because it is a submodule of the model, not of this layer
        self._backend = get_attn_backend(
            sizes.cached, torch.get_default_dtype(), self.kv_cache_dtype, use_mla=True, num_heads=sizes.heads
        )
        self.impl = LatentAttentionImpl(sizes, scale, self.kv_cache_dtype)
        add_cache_scales(self, quant_config, prefix)
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        """Called by vLLM. Frees the projection's own weight, which has no other reader."""
        sizes, (projection,) = self.sizes, self._projection
        try:
            uk, uv = take_kv_b_proj(projection, dtype, sizes.latent, sizes.heads, sizes.nope, sizes.value)
        except LookupError as error:
            raise UnsupportedFeatureError(str(error), "the model's quantization_config") from error
        self.weights = LatentWeights(uk, uv)

    def forward(
        self, query: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor, index: IndexRows | None = None
    ) -> torch.Tensor:
        """See `LatentAttentionImpl.attend`."""
        metadata: Any = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            metadata = metadata[self.layer_name]
        impl = cast(LatentAttentionImpl, self.impl)
        return impl.attend(
            self,
            query,
            latent,
            rotary,
            weights=self.weights,
            kv_cache=self.kv_cache,
            attn_metadata=metadata,
            index=index,
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        name = self.kv_cache_dtype
        # vLLM's dtype of 8-bit floats
        named = torch.uint8 if name.startswith("fp8") else FLOAT_KV_DTYPES.get(name, getattr(torch, name, None))
        dtype = vllm_config.model_config.dtype if name == "auto" else named
        fields: dict[str, Any] = {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": 1,
            "max_tp_shards": 1,
            "head_size": self.sizes.cached,
            "dtype": dtype,
            "cache_dtype_str": self.kv_cache_dtype,
        }
        if not self.index_size:
            return MLAAttentionSpec(**fields)
        model_dtype = cast(torch.dtype, vllm_config.model_config.dtype)
        return IndexedLatentSpec(**fields, index_size=self.index_size, index_dtype=model_dtype)


def _cache_dtype(cache_config: CacheConfig | None, quant_config: Any) -> str:
    """Chooses the dtype as vLLM's layers do: a checkpoint with a scheme for caches implies 8-bit floats."""
    if cache_config is None:
        return "auto"
    if cache_config.kv_cache_dtype_skip_layers:
        raise UnsupportedFeatureError(
            f"layers with a KV cache of another dtype {BESIDE_LATENTS}", "--kv-cache-dtype-skip-layers"
        )
    if cache_config.cache_dtype == "auto" and asks_for_narrow_cache(quant_config):
        return "fp8"
    return cache_config.cache_dtype
