"""What a compile-only warm-up leaves behind: results that nobody computed, filled with values that give them away."""

import threading
from typing import NamedTuple

from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.memory import memory

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

# By size of an integer in bytes. Out of range as an index of anything that fits on the card.
_INTEGERS = {1: 93, 2: 23_456, 4: 1_512_345_678, 8: 6_123_456_789_012_345_678}


class Remains(NamedTuple):
    """A tensor that still holds such values."""

    dtype: torch.dtype
    bytes: int


class Garbage:
    """Storages of the card that were results of something that did not run, while they live."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}
        self._lock = threading.Lock()

    def fill(self, tensor: Tensor) -> None:
        """Makes a tensor garbage: NaN, integers out of any range, True."""
        value = sentinel(tensor.dtype)
        if tensor.numel() == 0 or value is None:
            return
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            tensor.fill_(value)
        serial = memory.put(tensor)
        with self._lock:
            self._storages[serial] = StorageWeakRef(tensor.untyped_storage()), tensor.dtype

    def like(self, shaped: Tensor) -> Tensor:
        """A tensor of the card as one that has a shape and no contents (a fake one), full of garbage."""
        with _disable_current_modes(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            made = torch.empty_strided(shaped.shape, shaped.stride(), dtype=shaped.dtype)
        self.fill(made)
        return made

    def is_in(self, tensor: Tensor) -> bool:
        """Whether a tensor of the card holds garbage. Looks at values of storages that were garbage once, no others."""
        if not self._storages or memory.serial(tensor) not in self._storages:
            return False
        return _holds_sentinel(tensor)

    def check_read(self, operator: object, tensor: Tensor) -> None:
        """Raises where the host would read garbage."""
        if duties.on(22) and self.is_in(tensor):
            duties.refuse(
                22,
                operator,
                f"the host reads {tensor.dtype} {tuple(tensor.shape)}, which a compile-only warm-up did not compute",
                "read nothing during the warm-up, and fill persistent tensors again after it",
            )

    def find(self) -> list[Remains]:
        """The storages that live and still hold garbage: after a warm-up there must be none."""
        with self._lock:
            self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
            kept = list(self._storages.values())
        found = []
        for reference, dtype in kept:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                continue
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                whole = torch.empty(0, dtype=dtype).set_(storage)
                if _holds_sentinel(whole):
                    found.append(Remains(dtype, storage.nbytes()))
        return found

    def forget(self) -> None:
        """As in a process that has just started."""
        with self._lock:
            self._storages.clear()


def sentinel(dtype: torch.dtype) -> float | int | bool | None:
    """The value that garbage of a dtype has; None for complex numbers, which the card does not have."""
    if dtype.is_complex:
        return None
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else _INTEGERS[dtype.itemsize]


def _holds_sentinel(tensor: Tensor) -> bool:
    """One byte is too small for a value that is never meant: there all of them have to be it."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        if tensor.dtype == torch.bool or tensor.numel() == 0:
            return False
        values = tensor.float() if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor
        wrong = values.isnan() if values.is_floating_point() else values == sentinel(tensor.dtype)
        return bool(wrong.all() if tensor.dtype.itemsize == 1 else wrong.any())


garbage = Garbage()
