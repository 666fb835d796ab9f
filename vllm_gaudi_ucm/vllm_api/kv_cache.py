"""vLLM's description of a KV cache."""

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheLayout,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)

__all__ = [
    "AttentionSpec",
    "KVCacheConfig",
    "KVCacheLayout",
    "KVCacheSpec",
    "create_kv_cache_views",
    "layer_specs",
]


def layer_specs(config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """What each layer keeps, by name; layers of a group may differ in their sizes."""
    specs: dict[str, KVCacheSpec] = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            specs[name] = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    return specs
