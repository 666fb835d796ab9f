"""The KV cache of one layer: keys and values, two tensors that share no memory with anything, or one with both."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple, overload

import torch


class KvPair(NamedTuple):
    """Rows [num_blocks * block size, kv heads, head size] of keys and of values, one per token of a block.

    Each is contiguous, has a storage of its own and begins at its first element, on every device. A Gaudi's compiler
    writes in place only to such a tensor, and only if a graph writes its rows: a write to a view, or to one of two
    tensors of one storage, is a copy of the whole cache or is dropped (gaudi-pytorch-bridge,
    pass_reinplace_index_copy_ops; vllm-gaudi, models/qwen3_5.py). Two inputs of different storage offsets are two
    recipes.
    """

    key: torch.Tensor
    value: torch.Tensor


class LatentRows(NamedTuple):
    """Rows [num_blocks * block size, 1, latent size + rotary size] of multi-head latent attention: all query heads
    share one key per token, whose first elements, the latent, are its value too. One tensor as each of a `KvPair`."""

    key: torch.Tensor


LayerCache = KvPair | LatentRows
"""Whoever copies, moves, stores or counts blocks goes over the tensors, however many there are."""


@overload
def in_blocks(cache: LatentRows, block_size: int) -> LatentRows: ...
@overload
def in_blocks(cache: tuple[torch.Tensor, torch.Tensor], block_size: int) -> KvPair: ...
@overload
def in_blocks(cache: LayerCache, block_size: int) -> LayerCache: ...
def in_blocks(cache: tuple[torch.Tensor, ...], block_size: int) -> LayerCache:
    """Views [blocks, block size, kv heads, head size] of rows, to read from."""
    if isinstance(cache, LatentRows):
        return LatentRows(cache.key.unflatten(0, (-1, block_size)))
    key, value = cache
    return KvPair(key.unflatten(0, (-1, block_size)), value.unflatten(0, (-1, block_size)))


def distinct(caches: Iterable[LayerCache]) -> list[LayerCache]:
    """Each memory once: layers of several KV-cache groups have one, whose blocks are one group's at a time."""
    return list({id(cache): cache for cache in caches}.values())


def alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What has one shape and dtype, to be copied together, in the order given; a draft model's layers have another."""
    return [list(run) for _, run in groupby(tensors, key=lambda blocks: (blocks.shape, blocks.dtype))]
