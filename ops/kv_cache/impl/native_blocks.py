"""Copies of whole blocks in C++ (ops/native/source/kv_blocks.cpp), between caches on the CPU.

The call leaves Python's lock: other threads compute while one copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64

from torch import Tensor

from vllm_gaudi_ucm.ops.native.library import native


def can_swap(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Whether `swap` covers these: on a CPU, a block one run of bytes in one order on both sides, kernels built."""
    source, target = sources[0], targets[0]
    return (
        source.device.type == "cpu"
        and target.device.type == "cpu"
        and source.stride()[1:] == target.stride()[1:]
        and _is_dense(source)
        and all(cache.stride() == source.stride() for cache in sources)
        and all(cache.stride() == target.stride() for cache in targets)
        and native() is not None
    )


def swap(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor) -> None:
    """Validated caches for which `can_swap` holds; pairs: int64 [n, 2], contiguous."""
    kernels = native()
    assert kernels is not None, "can_swap said no"
    source, target = sources[0], targets[0]
    size, layers = source.element_size(), len(sources)
    addresses = c_int64 * layers
    kernels.ucm_swap_blocks(
        addresses(*[cache.data_ptr() for cache in sources]),
        addresses(*[cache.data_ptr() for cache in targets]),
        layers,
        pairs.data_ptr(),
        len(pairs),
        source[0].numel() * size,
        source.stride(0) * size,
        target.stride(0) * size,
        source.shape[0],
        target.shape[0],
    )


def _is_dense(cache: Tensor) -> bool:
    """Whether the elements of a block lie in one run, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
