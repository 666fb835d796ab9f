"""The KV-cache write: the new keys and values of a step go to their slots before attention reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.kv_cache.impl import native, reference
from vllm_gaudi_ucm.ops.triton_support import why_not_triton


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Writes one key and one value per row, cast to the cache's dtype.

    key: [rows, kv_heads, dim]; value: [rows, kv_heads, value_dim].
    key_cache: [blocks, block_size, kv_heads, dim]; value_cache likewise with value_dim; may be strided views.
    slots: int64 [rows], slot = block * block_size + offset, never negative. Pads write to slots of the dummy block;
        these may repeat, and what the dummy block then holds is unspecified.
    Raises ValueError for shapes, dtypes or devices that do not fit together (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _validate("key", key, key_cache, slots)
        _validate("value", value, value_cache, slots)
        if native.can_write(key, value, key_cache, value_cache, slots):
            native.write(key, value, key_cache, value_cache, slots)
            return
        if why_not_triton(slots.device.type) is None and _write_on_cuda(key, value, key_cache, value_cache, slots):
            return
    reference.write(key, key_cache, slots)
    reference.write(value, value_cache, slots)


def _write_on_cuda(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> bool:
    # imported on first use: triton is not everywhere
    from vllm_gaudi_ucm.ops.kv_cache.impl import cuda

    covered = cuda.can_write(key, value, key_cache, value_cache)
    if covered:
        cuda.write(key, value, key_cache, value_cache, slots)
    return covered


def _validate(name: str, tokens: Tensor, cache: Tensor, slots: Tensor) -> None:
    if cache.dim() != 4 or tokens.dim() != 3 or tokens.shape[1:] != cache.shape[2:]:
        raise ValueError(
            f"write_kv: {name} has shape {tuple(tokens.shape)}, expected [rows, kv_heads, dim] "
            f"for a cache of shape {tuple(cache.shape)}"
        )
    if slots.dtype != torch.int64 or slots.shape != tokens.shape[:1]:
        raise ValueError(
            f"write_kv: slots are {slots.dtype} {tuple(slots.shape)}, expected torch.int64 {tuple(tokens.shape[:1])}"
        )
    if not tokens.device == cache.device == slots.device:
        raise ValueError(
            f"write_kv: {name} is on {tokens.device}, its cache on {cache.device}, slots on {slots.device}; "
            "expected one device"
        )
