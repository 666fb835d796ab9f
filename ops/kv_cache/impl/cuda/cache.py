"""KV-cache operations on CUDA in Triton, one launch each; nothing is read on the host.

Kernels are imported where they are launched, because triton is optional.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.kv_cache.impl.reference import gather, scatter, stacked
from vllm_gaudi_ucm.ops.kv_cache.implementation import KvCacheImplementation
from vllm_gaudi_ucm.ops.registry import why_not_triton

ROW_PIECE = 1024  # elements of a row that a program copies at once
BLOCK_PIECE = 4096  # elements of a block that one program copies


class CudaKvCache(KvCacheImplementation):
    """KV-cache operations by Triton kernels, on a GPU."""

    devices = frozenset({"cuda"})
    priority = 20

    def unavailable(self, device: str) -> str | None:
        return why_not_triton(device)

    def write(self, key: Tensor, value: Tensor, key_rows: Tensor, value_rows: Tensor, slots: Tensor) -> bool:
        covered = can_write(key, value, key_rows, value_rows)
        if covered:
            write(key, value, key_rows, value_rows, slots)
        return covered

    def swap(self, sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor, non_blocking: bool) -> bool:
        """Covers caches whose blocks are contiguous; on the host the blocks of all layers must be evenly spaced,
        too.
        """
        source, target = sources[0].device, targets[0].device
        if source == target:
            covered = can_copy(sources, targets)
            if covered:
                copy(sources, targets, pairs.to(source))
            return covered
        if target.type == "cpu":
            return to_host(sources, targets, pairs, non_blocking)
        return source.type == "cpu" and from_host(sources, targets, pairs, non_blocking)


def to_host(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor, non_blocking: bool) -> bool:
    """One launch that gathers the blocks of all layers, and one transfer."""
    if stacked(targets) is None:
        return False
    blocks = sources[0].new_empty((len(sources), len(pairs), *sources[0].shape[1:]))
    places = list(blocks)
    if not can_copy(sources, places):
        return False
    copy(sources, places, torch.stack([pairs[:, 0], torch.arange(len(pairs))], 1).to(blocks.device))
    scatter(blocks, targets, pairs[:, 1], non_blocking)
    return True


def from_host(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor, non_blocking: bool) -> bool:
    """One transfer, and one launch that brings the blocks of all layers to their places."""
    if stacked(sources) is None:
        return False
    device = targets[0].device
    places = list(gather(sources, pairs[:, 0]).to(device, non_blocking=non_blocking))
    if not can_copy(places, targets):
        return False
    copy(places, targets, torch.stack([torch.arange(len(pairs)), pairs[:, 1]], 1).to(device))
    return True


def can_write(key: Tensor, value: Tensor, key_rows: Tensor, value_rows: Tensor) -> bool:
    """True if `write` covers these tensors: contiguous heads, and the same slot and head strides in both caches."""
    dense = all(tensor.stride(-1) == 1 for tensor in (key, value, key_rows, value_rows))
    return dense and key_rows.shape[:2] == value_rows.shape[:2]


def write(key: Tensor, value: Tensor, key_rows: Tensor, value_rows: Tensor, slots: Tensor) -> None:
    """Writes validated tensors for which `can_write` holds; a row whose slot is outside of the cache is not written."""
    from vllm_gaudi_ucm.ops.kv_cache.impl.cuda.triton import blocks as kernels

    rows, heads, dim = key.shape
    if not rows:
        return
    largest = heads * max(dim, value.shape[2])
    kernels.write_rows[(rows,)](
        key,
        value,
        key_rows,
        value_rows,
        slots.contiguous(),
        key_rows.shape[0],
        *key.stride()[:2],
        *value.stride()[:2],
        *key_rows.stride()[:2],
        *value_rows.stride()[:2],
        HEADS=heads,
        DIM=dim,
        VALUE_DIM=value.shape[2],
        BLOCK=min(ROW_PIECE, 1 << (largest - 1).bit_length()),
        num_warps=4,
    )


def can_copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """True if `copy` covers these caches [blocks, ...]: one device, contiguous blocks, one order of axes."""
    source, target = sources[0], targets[0]
    expected = 1
    for stride, size in sorted(zip(source.stride()[1:], source.shape[1:], strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return (
        source.device == target.device
        and source.stride()[1:] == target.stride()[1:]
        and all(cache.stride() == source.stride() for cache in sources)
        and all(cache.stride() == target.stride() for cache in targets)
    )


def copy(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor) -> None:
    """Copies blocks of caches for which `can_copy` holds; pairs: int64 [n, 2] on the device (source, target)."""
    import triton.language as tl

    from vllm_gaudi_ucm.ops.kv_cache.impl.cuda.triton import blocks as kernels

    words = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
    source, target = sources[0], targets[0]
    size = source[0].numel()
    pieces = -(-size // BLOCK_PIECE)
    # each layer's tensor is an allocation of its own
    addresses = torch.tensor([cache.data_ptr() for cache in (*sources, *targets)], dtype=torch.int64)
    kernels.copy_pairs[(pairs.shape[0] * pieces, len(sources))](
        addresses.to(source.device),
        pairs,
        size,
        pieces,
        len(sources),
        source.stride(0),
        target.stride(0),
        WORD=words[source.element_size()],
        BLOCK=BLOCK_PIECE,
        num_warps=8,
    )
