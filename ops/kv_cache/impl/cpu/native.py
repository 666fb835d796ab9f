"""KV-cache operations in C++ (ops/cpu/native/source/kv_write.cpp), on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_int64
from functools import lru_cache

from torch import Tensor

from vllm_gaudi_ucm.ops.cpu.native.library import native, why_not_native
from vllm_gaudi_ucm.ops.kv_cache.implementation import KvCacheImplementation


class NativeKvCache(KvCacheImplementation):
    """KV-cache operations by C++ kernels, on CPUs where they can be built."""

    devices = frozenset({"cpu"})
    priority = 20

    def unavailable(self, device: str) -> str | None:
        return super().unavailable(device) or why_not_native() or None

    def write(self, key: Tensor, value: Tensor, key_rows: Tensor, value_rows: Tensor, slots: Tensor) -> bool:
        covered = can_write(key, value, key_rows, value_rows, slots)
        if covered:
            write(key, value, key_rows, value_rows, slots)
        return covered

    def swap(self, sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor, non_blocking: bool) -> bool:
        covered = can_swap(sources, targets)
        if covered:
            swap(sources, targets, pairs)
        return covered


def can_write(key: Tensor, value: Tensor, key_rows: Tensor, value_rows: Tensor, slots: Tensor) -> bool:
    """True if `write` covers these tensors here: on a CPU, dense heads, no cast, native kernels built."""
    return (
        slots.device.type == "cpu"
        and native() is not None
        and key.dtype == key_rows.dtype
        and value.dtype == value_rows.dtype
        and slots.is_contiguous()
        # both caches are addressed by one slot and one head
        and key_rows.shape[:2] == value_rows.shape[:2]
        and all(tensor.stride(-1) == 1 for tensor in (key, value, key_rows, value_rows))
    )


def write(key: Tensor, value: Tensor, key_rows: Tensor, value_rows: Tensor, slots: Tensor) -> None:
    """Writes validated tensors for which `can_write` holds; nothing is written if a slot is outside of the cache."""
    kernels = native()
    assert kernels is not None, "can_write said no"
    size, value_size = key.element_size(), value.element_size()
    num_slots, heads, dim = key_rows.shape
    elements = (key.stride(), value.stride(), key_rows.stride(), value_rows.stride())
    row = kernels.ucm_write_kv(
        key.data_ptr(),
        value.data_ptr(),
        key_rows.data_ptr(),
        value_rows.data_ptr(),
        slots.data_ptr(),
        key.shape[0],
        heads,
        dim * size,
        value.shape[2] * value_size,
        num_slots,
        _bytes(elements, (size, value_size, size, value_size)),
    )
    if row >= 0:
        raise IndexError(f"write_kv: slot {int(slots[row])} is out of range, expected slots from 0 to {num_slots - 1}")


@lru_cache(maxsize=64)
def _bytes(strides: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> Array[c_int64]:
    """Returns strides in elements as one array of bytes, without strides inside a head; the layers of a model are
    alike.
    """
    found = [size * number for stride, size in zip(strides, sizes, strict=True) for number in stride[:-1]]
    return (c_int64 * len(found))(*found)


def can_swap(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """True if `swap` covers these caches: on a CPU, blocks contiguous and in the same order, and the kernels are
    built.
    """
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
    """Copies between validated caches for which `can_swap` holds; pairs: int64 [n, 2], contiguous."""
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
    """True if the elements of a block are contiguous, in any order of axes."""
    expected = 1
    for stride, size in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
