"""KV-cache operations on CUDA in Triton, each one launch; nothing is read on the host.

Kernels are imported where they are launched: triton is not everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.kv_cache.impl.reference import stacked
from vllm_gaudi_ucm.ops.kv_cache.implementation import KvCacheImplementation
from vllm_gaudi_ucm.ops.registry import why_not_triton

ROW_PIECE = 1024  # elements of a row that a program copies at once
BLOCK_PIECE = 4096  # elements of a block that one program copies

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CudaKvCache(KvCacheImplementation):
    """Triton kernels, on a GPU."""

    devices = frozenset({"cuda"})
    priority = 20

    def unavailable(self, device: str) -> str | None:
        return why_not_triton(device)

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> bool:
        covered = can_write(key, value, key_cache, value_cache)
        if covered:
            write(key, value, key_cache, value_cache, slots)
        return covered

    def swap(self, sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor, non_blocking: bool) -> bool:
        """Covers copies within one GPU, of layers that lie evenly spaced."""
        device = sources[0].device
        if device != targets[0].device:
            return False
        source, target = stacked(sources), stacked(targets)
        if source is None or target is None or not can_copy(source, target):
            return False
        copy(source, target, pairs.to(device))
        return True


def can_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether `write` covers these tensors: elements of a head side by side, one block and head in both caches."""
    dense = all(tensor.stride(-1) == 1 for tensor in (key, value, key_cache, value_cache))
    return dense and key_cache.shape[:3] == value_cache.shape[:3]


def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Writes validated tensors for which `can_write` holds; a row whose slot is outside of the cache is not written."""
    from vllm_gaudi_ucm.ops.kv_cache.impl.triton import blocks as kernels

    rows, heads, dim = key.shape
    if not rows:
        return
    blocks, block_size = key_cache.shape[:2]
    largest = heads * max(dim, value.shape[2])
    kernels.write_rows[(rows,)](
        key,
        value,
        key_cache,
        value_cache,
        slots.contiguous(),
        blocks * block_size,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        HEADS=heads,
        DIM=dim,
        VALUE_DIM=value.shape[2],
        BLOCK_SIZE=block_size,
        BLOCK=min(ROW_PIECE, 1 << (largest - 1).bit_length()),
        num_warps=4,
    )


def can_copy(source: Tensor, target: Tensor) -> bool:
    """Whether `copy` covers these stacks [layers, blocks, ...]: one device, a block one run of memory in one order."""
    block = sorted(zip(source.stride()[2:], source.shape[2:], strict=True))
    expected = 1
    for stride, size in block:
        if size > 1 and stride != expected:
            return False
        expected *= size
    return source.device == target.device and source.stride()[2:] == target.stride()[2:]


def copy(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copies blocks of stacks for which `can_copy` holds; pairs: int64 [n, 2] on the device (source, target)."""
    from vllm_gaudi_ucm.ops.kv_cache.impl.triton import blocks as kernels

    word = _WORDS[source.element_size()]
    size = source[0, 0].numel()
    pieces = -(-size // BLOCK_PIECE)
    kernels.copy_pairs[(pairs.shape[0] * pieces, source.shape[0])](
        source.view(word) if source.dtype != word else source,
        target.view(word) if target.dtype != word else target,
        pairs,
        size,
        pieces,
        *source.stride()[:2],
        *target.stride()[:2],
        BLOCK=BLOCK_PIECE,
        num_warps=8,
    )
