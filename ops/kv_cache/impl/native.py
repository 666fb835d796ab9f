"""KV-cache operations in C++ (ops/native/source/kv_write.cpp), on CPU."""

from __future__ import annotations

from ctypes import Array, c_int64
from functools import lru_cache

from torch import Tensor

from vllm_gaudi_ucm.ops.native.library import native


def can_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> bool:
    """Whether `write` covers these tensors here: on a CPU, dense heads, no cast, native kernels built."""
    return (
        slots.device.type == "cpu"
        and native() is not None
        and key.dtype == key_cache.dtype
        and value.dtype == value_cache.dtype
        and slots.is_contiguous()
        # one block and one head are addressed in both
        and key_cache.shape[:3] == value_cache.shape[:3]
        and all(tensor.stride(-1) == 1 for tensor in (key, value, key_cache, value_cache))
    )


def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Writes validated tensors for which `can_write` holds; nothing is written if a slot is outside of the cache."""
    kernels = native()
    assert kernels is not None, "can_write said no"
    size, value_size = key.element_size(), value.element_size()
    blocks, block_size, heads, dim = key_cache.shape
    elements = (key.stride(), value.stride(), key_cache.stride(), value_cache.stride())
    row = kernels.ucm_write_kv(
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slots.data_ptr(),
        key.shape[0],
        heads,
        dim * size,
        value.shape[2] * value_size,
        blocks,
        block_size,
        _bytes(elements, (size, value_size, size, value_size)),
    )
    if row >= 0:
        raise IndexError(
            f"write_kv: slot {int(slots[row])} is out of range, expected slots from 0 to {blocks * block_size - 1}"
        )


@lru_cache(maxsize=64)
def _bytes(strides: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> Array[c_int64]:
    """Strides of elements as one array of bytes, without those inside a head; the layers of a model are alike."""
    found = [size * number for stride, size in zip(strides, sizes, strict=True) for number in stride[:-1]]
    return (c_int64 * len(found))(*found)
