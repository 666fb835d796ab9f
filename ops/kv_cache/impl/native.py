"""KV-cache operations in C++ (ops/native/source/kv_write.cpp), on CPU."""

from __future__ import annotations

from ctypes import c_int64

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
        and all(tensor.stride(-1) == 1 for tensor in (key, value, key_cache, value_cache))
    )


def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Writes validated tensors for which `can_write` holds; nothing is written if a slot is outside of the cache."""
    kernels = native()
    assert kernels is not None, "can_write said no"
    size, value_size = key.element_size(), value.element_size()
    blocks, block_size, heads, dim = key_cache.shape
    strides = (
        *(size * number for number in key.stride()[:2]),
        *(value_size * number for number in value.stride()[:2]),
        *(size * number for number in key_cache.stride()[:3]),
        *(value_size * number for number in value_cache.stride()[:3]),
    )
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
        (c_int64 * len(strides))(*strides),
    )
    if row >= 0:
        raise IndexError(
            f"write_kv: slot {int(slots[row])} is out of range, expected slots from 0 to {blocks * block_size - 1}"
        )
