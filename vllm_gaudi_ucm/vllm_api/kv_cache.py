"""vLLM's description of a KV cache."""

from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheLayout, KVCacheSpec, create_kv_cache_views

__all__ = [
    "AttentionSpec",
    "KVCacheConfig",
    "KVCacheLayout",
    "KVCacheSpec",
    "create_kv_cache_views",
]
