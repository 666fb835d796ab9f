"""Names of vLLM that tests use, and that the supported versions have in different places or forms."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:
    # vLLM 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

__all__ = ["kv_cache_configs", "make_arg_parser"]


def kv_cache_configs(
    config: VllmConfig, layers: list[dict[str, KVCacheSpec]], memory: list[int]
) -> list[KVCacheConfig]:
    """What the engine makes of the layers of each worker, and of the bytes that each has for them."""
    try:
        from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    except ImportError:
        # vLLM 0.32
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        return get_kv_cache_configs(config, layers, memory)
    return get_kv_cache_configs(config, layers, memory, get_global_kv_cache_groups(config, layers))
