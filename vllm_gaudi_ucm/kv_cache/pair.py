"""The KV cache of one layer: keys and values in two tensors with separate memory, or both in one tensor."""

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
    share one key per token; its first elements, the latent, are also its value. The tensor is like each of a `KvPair`.
    """

    key: torch.Tensor


class IndexedLatents(NamedTuple):
    """`LatentRows` of a layer whose rows choose tokens by themselves (DSA), and the keys of its indexer:
    index_key, [num_blocks * block size, 1, index size]. The tensors are like each of a `KvPair`.
    """

    key: torch.Tensor
    index_key: torch.Tensor


LayerCache = KvPair | LatentRows | IndexedLatents
"""Code that copies, moves, stores or counts blocks iterates over the tensors, whatever their number."""


@overload
def in_blocks(cache: LatentRows, block_size: int) -> LatentRows: ...
@overload
def in_blocks(cache: tuple[torch.Tensor, torch.Tensor], block_size: int) -> KvPair: ...
@overload
def in_blocks(cache: LayerCache, block_size: int) -> LayerCache: ...
def in_blocks(cache: tuple[torch.Tensor, ...], block_size: int) -> LayerCache:
    """Returns views [blocks, block size, kv heads, head size] of rows, for reading."""
    if isinstance(cache, LatentRows):
        return LatentRows(cache.key.unflatten(0, (-1, block_size)))
    if isinstance(cache, IndexedLatents):
        return IndexedLatents(*(rows.unflatten(0, (-1, block_size)) for rows in cache))
    key, value = cache
    return KvPair(key.unflatten(0, (-1, block_size)), value.unflatten(0, (-1, block_size)))


def distinct(caches: Iterable[LayerCache]) -> list[LayerCache]:
    """Returns each memory once: layers of several groups share one, whose blocks belong to one group at a time."""
    return list({id(cache): cache for cache in caches}.values())


def alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups consecutive tensors of one shape and dtype, to be copied together; a draft model's differ."""
    return [list(run) for _, run in groupby(tensors, key=lambda blocks: (blocks.shape, blocks.dtype))]
