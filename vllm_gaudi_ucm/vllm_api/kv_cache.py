"""Description of a KV cache: `vllm.v1.kv_cache_interface`, which may be imported while vLLM looks for its platform.

Extension point: `KVCacheSpec`, `AttentionSpec`, `KVCacheConfig` and `KVCacheLayout` are what a platform plugin's worker
and attention backend are given and return.
Internal: `UniformTypeKVCacheSpecs`, the specification of a group whose layers differ.
"""

from collections.abc import Mapping
from dataclasses import replace

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheLayout,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)

__all__ = [
    "AttentionSpec",
    "KVCacheConfig",
    "KVCacheLayout",
    "KVCacheSpec",
    "in_tiles",
    "layer_specs",
    "per_token",
]


def layer_specs(config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """What each layer keeps, by name; layers of a group may differ in their sizes.

    Reason: `KVCacheConfig` has a specification for each group, and one that is a mapping where its layers differ.
    Remove when: `KVCacheConfig` can be asked for the specification of a layer.
    """
    specs: dict[str, KVCacheSpec] = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            specs[name] = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    return specs


def per_token(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """The same layers with blocks of one token.

    Reason: vLLM has one block size for what its scheduler allocates and for what attention reads. The size in the
    specifications decides for the scheduler.
    Remove when: `CacheConfig` has a size of its own for allocation.
    """
    return {name: _with_block_size(spec, 1) for name, spec in specs.items()}


def in_tiles(config: KVCacheConfig, tile: int) -> KVCacheConfig:
    """A cache with blocks of one token, as a worker allocates it: tile 0 is the dummy block, and the tiles behind it
    hold all slots but vLLM's null slot.

    Reason: as for `per_token`.
    Remove when: as for `per_token`.
    """
    groups = [
        replace(group, kv_cache_spec=_with_block_size(group.kv_cache_spec, tile)) for group in config.kv_cache_groups
    ]
    return replace(config, num_blocks=1 - (1 - config.num_blocks) // tile, kv_cache_groups=groups)


def _with_block_size(spec: KVCacheSpec, size: int) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        layers = {name: _with_block_size(layer, size) for name, layer in spec.kv_cache_specs.items()}
        return replace(spec, block_size=size, kv_cache_specs=layers)
    return replace(spec, block_size=size)
