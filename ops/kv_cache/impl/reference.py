"""KV-cache operations in plain torch, on any device and, except for a check on CPU, without host reads."""

from __future__ import annotations

import torch
from torch import Tensor


def write(tokens: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Writes tokens [rows, kv_heads, dim] to cache [blocks, block_size, kv_heads, dim] at slots [rows]."""
    block_size = cache.shape[1]
    tokens = tokens.to(cache.dtype)
    if cache.stride(0) == block_size * cache.stride(1):
        # Only then is [blocks * block_size, ...] a view; flatten would silently write to a copy otherwise.
        cache.flatten(0, 1).index_copy_(0, slots, tokens)
    else:
        # index_put takes a negative index for one from the end and would write to the last block without a word.
        if slots.device.type == "cpu" and not torch.compiler.is_compiling() and bool((slots < 0).any()):
            raise IndexError(f"write_kv: slot {int(slots.min())} is out of range, expected slots from 0 on")
        blocks = slots.div(block_size, rounding_mode="floor")
        cache[blocks, slots - blocks * block_size] = tokens
