"""Description of a KV cache: `vllm.v1.kv_cache_interface`, which may be imported while vLLM looks for its platform.

Extension point: `KVCacheSpec`, `AttentionSpec`, `KVCacheConfig` and `KVCacheLayout` are what a platform plugin's worker
and attention backend are given and return.
Internal: `UniformTypeKVCacheSpecs`, the specification of a group whose layers differ.
"""

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
    "layer_specs",
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
