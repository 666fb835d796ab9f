"""Options of the KV cache that the platform sets: the tile of slots, and dtypes of our own.

Imports vLLM inside functions only: our platform class, which is loaded while vLLM is being imported, comes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_TILE = "ucm_tile_of_slots"


def keep_tile_of_slots(vllm_config: VllmConfig, tile: int) -> None:
    """Stores how many slots attention reads as a block, for the scheduler, if requests get strips of slots. An
    attribute of the object is pickled with it.

    Reason: the engine replaces `CacheConfig.block_size` by 1 before it makes the scheduler, and no other argument of a
    scheduler class carries its workers' decisions. `additional_config` is the user's.
    Remove when: as for `in_blocks_of`, or `KVCacheConfig` carries what a worker adds.
    """
    if tile_of_slots(vllm_config) is None:
        setattr(vllm_config.scheduler_config, _TILE, tile)


def tile_of_slots(vllm_config: VllmConfig) -> int | None:
    """Returns the slots that attention reads as a block; None if requests get no strips.

    Reason: the other half of `keep_tile_of_slots`.
    Remove when: as for `keep_tile_of_slots`.
    """
    tile: int | None = getattr(vllm_config.scheduler_config, _TILE, None)
    return tile


FLOAT_KV_DTYPES: Mapping[str, torch.dtype] = {"ucm_float16": torch.float16, "ucm_bfloat16": torch.bfloat16}
"""Values of `--kv-cache-dtype` for a cache in a float dtype other than the model's, if vLLM lets platforms have
some.
"""


def register_float_kv_dtypes() -> None:
    """Lets `--kv-cache-dtype` take the names of `FLOAT_KV_DTYPES`. Safe to call twice.

    Reason: vLLM 0.33 refuses `float16` and `bfloat16` for a model of another dtype before it asks the platform, and has
    a hook for a platform's own dtypes. vLLM 0.32 has no such hook, and takes both names.
    Remove when: vLLM leaves it to attention backends which dtypes of model and cache go together.
    """
    from vllm.config import cache
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    if not hasattr(cache, "register_kv_cache_dtype"):
        return  # vLLM 0.32
    for name, dtype in FLOAT_KV_DTYPES.items():
        if name not in STR_DTYPE_TO_TORCH_DTYPE:
            cache.register_kv_cache_dtype(name)(_float_dtype(name, dtype))


def _float_dtype(name: str, dtype: torch.dtype) -> type:
    """vLLM's `KVCacheDTypeHandler`, which it makes itself."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    methods = {"torch_dtype": lambda _: dtype, "quant_mode": lambda _: KVQuantMode.NONE}
    return type(name, (), {"name": name, **methods})


def float_kv_dtype(name: str) -> str:
    """Returns the value of `--kv-cache-dtype` for a cache in `float16` or `bfloat16` under a model of another dtype.

    Reason: as for `register_float_kv_dtypes`.
    Remove when: as for `register_float_kv_dtypes`.
    """
    from vllm.config import cache

    return f"ucm_{name}" if hasattr(cache, "register_kv_cache_dtype") else name
