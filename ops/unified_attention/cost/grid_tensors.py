"""The KV cache that a fit's steps read, and their parts on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.cost.grid import Geometry
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts


def make_cache(geometry: Geometry, blocks: int, device: torch.device) -> Tensor:
    """[2, blocks, block_size, kv_heads, dim] in the geometry's dtype: keys, then values; random, but repeating."""
    some = torch.randn(64, geometry.kv_heads, geometry.dim, generator=torch.Generator().manual_seed(0))
    numbers = blocks * geometry.block_size // 64 + 1
    tokens = some.to(geometry.dtype).to(device).repeat(2, numbers, 1, 1)
    return tokens[:, : blocks * geometry.block_size].unflatten(1, (blocks, geometry.block_size))


def on_device(parts: AttentionParts, device: torch.device) -> AttentionParts:
    """The parts with their tensors on the device."""
    if device.type == "cpu":
        return parts

    def moved(part: object) -> object:
        if isinstance(part, Tensor):
            return part.to(device)
        if isinstance(part, tuple):
            entries: list[Any] = [moved(entry) for entry in part]
            return type(part)(*entries) if hasattr(part, "_fields") else tuple(entries)
        return part

    result = moved(parts)
    assert isinstance(result, AttentionParts)
    return result
