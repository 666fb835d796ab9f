"""KV-cache operations in plain torch, on any device and, except for a check on CPU, without host reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.kv_cache.implementation import KvCacheImplementation


class ReferenceKvCache(KvCacheImplementation):
    """Any tensors, on any device."""

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> bool:
        write(key, key_cache, slots)
        write(value, value_cache, slots)
        return True

    def swap(self, sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor, non_blocking: bool) -> bool:
        swap(sources, targets, pairs, non_blocking)
        return True


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


def swap(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor, non_blocking: bool = False) -> None:
    """Validated `pairs`, int64 [n, 2] on the host, from sources [blocks, ...] to targets [blocks, ...]."""
    source, target = stacked(sources), stacked(targets)
    if source is not None and target is not None:
        _swap_one(source, target, pairs, 1, non_blocking)
        return
    for one, other in zip(sources, targets, strict=True):
        _swap_one(one, other, pairs, 0, non_blocking)


def stacked(caches: Sequence[Tensor]) -> Tensor | None:
    """The caches as one view [layers, blocks, ...]; None where they do not lie evenly spaced in one allocation."""
    first = caches[0]
    if len(caches) == 1:
        return first.unsqueeze(0)
    storage = first.untyped_storage().data_ptr()
    distance = caches[1].storage_offset() - first.storage_offset()
    for index, cache in enumerate(caches):
        offset = first.storage_offset() + index * distance
        if (
            cache.untyped_storage().data_ptr() != storage
            or cache.stride() != first.stride()
            or cache.storage_offset() != offset
        ):
            return None
    if distance <= 0:
        return None
    return first.as_strided((len(caches), *first.shape), (distance, *first.stride()), first.storage_offset())


def _swap_one(source: Tensor, target: Tensor, pairs: Tensor, dim: int, non_blocking: bool) -> None:
    """Blocks lie along `dim`. A run of consecutive blocks on the host needs no gathering there."""
    source_ids, target_ids = pairs[:, 0], pairs[:, 1]
    count = len(pairs)
    if _is_run(source_ids) and source.device.type == "cpu":
        blocks = source.narrow(dim, int(source_ids[0]), count)
    else:
        blocks = source.index_select(dim, source_ids.to(source.device))
    if _is_run(target_ids) and target.device.type == "cpu":
        target.narrow(dim, int(target_ids[0]), count).copy_(blocks, non_blocking=non_blocking)
        return
    # a target on the host is written at once, so its blocks must be there
    wait = not non_blocking or target.device.type == "cpu"
    target.index_copy_(dim, target_ids.to(target.device), blocks.to(target.device, non_blocking=not wait))


def _is_run(ids: Tensor) -> bool:
    return bool(torch.equal(ids, torch.arange(int(ids[0]), int(ids[0]) + len(ids))))
