"""Numbers for memories, in order of first appearance: the flow of data without addresses."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class MemoryNumbers:
    """A number for each memory that was seen, as long as it lives.

    A memory is told by the Python object of its storage, which lives exactly as long as the storage. Nothing of one
    that is gone is kept: a weak reference of torch's own keeps the header of the storage, a few bytes on the heap that
    keep a large freed block beside them from being used again (5.7 GiB after 120 tensors of 48 MiB, one at a time).
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, weakref.ref[object]]] = {}
        self._count = 0

    def __contains__(self, memory: int) -> bool:
        return memory in self._seen

    def number(self, tensor: Tensor, memory: int) -> tuple[int, bool]:
        """The number of a tensor's memory, and whether it is seen for the first time. memory: what `memory_of` said."""
        known = self._seen.get(memory)
        if known is not None:
            return known[0], False
        seen, number = self._seen, self._count
        # called before the storage is gone: its id is given to nothing that is still found here
        seen[memory] = number, weakref.ref(_owner(tensor), lambda _: seen.pop(memory))
        self._count += 1
        return number, True


def memory_of(tensor: Tensor) -> int:
    """What tells memories apart while they live."""
    return id(_owner(tensor))


def _owner(tensor: Tensor) -> object:
    """A packed weight has no storage and stands for itself."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else tensor
