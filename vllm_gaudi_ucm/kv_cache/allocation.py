"""The KV cache: one allocation as vLLM describes it, viewed per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheLayout, KVCacheSpec, create_kv_cache_views

from vllm_gaudi_ucm.kv_cache.host_pages import zeroed_pages

# vLLM's block pool keeps block 0 for itself (the null block) and never hands it to a request: pads point at it.
DUMMY_BLOCK = 0


def allocate_kv_cache(
    config: KVCacheConfig,
    device: torch.device,
    separate_layers: bool = False,
    is_idle: Callable[[], bool] = lambda: True,
) -> dict[str, torch.Tensor]:
    """Allocates the cache and returns, per layer name, a view [blocks, kv heads, block size, k | v].

    The dummy block is all zeros at first, so that reading it is harmless even before anything was written.

    separate_layers: an allocation per layer instead of one for all. torch.compile needs it: it takes tensors of one
        allocation that a graph writes for one tensor, and then finds sizes that it did not compile for (torch 2.13).
    is_idle: whether pages of the host may be provided now; see `zeroed_pages`.
    """
    if separate_layers:
        shapes = _views(config, torch.device("meta"))
        return {
            name: torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=device).zero_()
            for name, view in shapes.items()
        }
    return _views(config, device, is_idle)


def _views(
    config: KVCacheConfig, device: torch.device, is_idle: Callable[[], bool] = lambda: True
) -> dict[str, torch.Tensor]:
    specs = {name: group.kv_cache_spec for group in config.kv_cache_groups for name in group.layer_names}
    (size,) = {tensor.size for tensor in config.kv_cache_tensors}
    on_host = device.type == "cpu"
    backing = zeroed_pages(size, is_idle) if on_host else torch.zeros(size, dtype=torch.int8, device=device)
    layout = KVCacheLayout[config.kv_cache_layout or KVCacheLayout.LBNHC.name]
    caches: dict[str, torch.Tensor] = {}
    for tensor in config.kv_cache_tensors:
        spec = _spec_of(specs, tensor.layers[0])
        views = create_kv_cache_views(backing, spec, config.num_blocks, layout, tensor)
        caches.update(zip(tensor.layers, views, strict=True))
    return caches


def dummy_kv_cache(specs: Mapping[str, KVCacheSpec], device: torch.device) -> dict[str, torch.Tensor]:
    """A cache of the dummy block alone for each layer, in the layout of the real one."""
    caches = {}
    for name, spec in specs.items():
        assert isinstance(spec, AttentionSpec), "only layers with keys and values are served"
        width = spec.page_size_bytes // (spec.block_size * spec.num_kv_heads * spec.dtype.itemsize)
        shape = (1, spec.block_size, spec.num_kv_heads, width)
        caches[name] = torch.zeros(shape, dtype=spec.dtype, device=device).transpose(1, 2)
    return caches


def split_key_value(kv_cache: torch.Tensor, key_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, kv heads, block size, k | v] -> key and value views [blocks, block size, kv heads, head size]."""
    by_token = kv_cache.transpose(1, 2)
    return by_token[..., :key_size], by_token[..., key_size:]


def _spec_of(specs: dict[str, KVCacheSpec], layer: str) -> KVCacheSpec:
    spec = specs[layer]
    per_layer = getattr(spec, "kv_cache_specs", None)
    return spec if per_layer is None else per_layer[layer]
