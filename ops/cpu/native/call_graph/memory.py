"""Memory for graphs on a CPU: a range of addresses, lent from the lowest free address up."""

from __future__ import annotations

import mmap
import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# a cache line, and the width of the widest vectors
_ALIGNMENT = 64


class Arena:
    """A range of addresses. The kernel provides a page on its first write, so an arena costs as much memory as was ever
    used.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        pages = mmap.mmap(-1, _aligned(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory: NDArray[np.uint8] = np.frombuffer(pages, np.uint8)
        self.reached = 0
        """Bytes from the beginning to the end of the last byte that was ever lent."""
        self._address: int = self.memory.ctypes.data
        self._lent: dict[int, int] = {}
        # in order, and disjoint
        self._gaps = [(0, len(self.memory))]

    def take_bytes(self, size: int) -> int | None:
        """Lends `size` bytes and returns their start; None if no gap is large enough."""
        size = _aligned(size)
        for index, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                self._gaps[index : index + 1] = [(start + size, end)] if end - start > size else []
                self._lent[start] = start + size
                self.reached = max(self.reached, start + size)
                return start
        return None

    def give_back(self, start: int) -> None:
        """Takes back memory; start: the value that `take` returned."""
        joined: list[tuple[int, int]] = []
        for begin, end in sorted([*self._gaps, (start, self._lent.pop(start))]):
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((begin, end))
        self._gaps = joined

    def find(self, address: int) -> int | None:
        """The start of the lent memory that holds an address; None for an address outside the arena."""
        start = address - self._address
        return start if 0 <= start < len(self.memory) else None


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# Bytes of addresses; 64 rows of a model of 70B parameters reach 30 MB into it.
ARENA_BYTES = 1 << 28


class MemoryPool:
    """Makes tensors in memory that stays allocated for good, so that a replayed graph can read it.

    When the last view of a tensor is gone, the next tensor may take its memory. A graph does not keep memory from being
    reused either (`unkept`). So graphs that never run at the same time overlap from the beginning of the arena, and all
    together take the memory of the largest, in whatever order they were captured. Tensors that outlive a run, such as a
    table that a model fills once, keep their memory.
    """

    def __init__(self, arena_bytes: int = ARENA_BYTES) -> None:
        self._arena_bytes = arena_bytes
        self._arenas: list[Arena] = []
        self._returned: deque[tuple[Arena, int]] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes that tensors have ever used."""
        return sum(arena.reached for arena in self._arenas)

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A dense, uninitialised tensor on the CPU."""
        size = shape.numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        # here and not in a finaliser, which may run in between, or in another thread
        while self._returned:
            arena, start = self._returned.popleft()
            arena.give_back(start)
        arena, start = self._place(size)
        # torch holds this view until no tensor uses its memory
        lent = arena.memory[start : start + size]
        weakref.finalize(lent, self._returned.append, (arena, start)).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    def unkept(self, tensor: Tensor) -> Tensor:
        """Returns the same tensor or, if the pool owns its memory, a tensor that does not keep the memory from
        being lent again.
        """
        if tensor.layout is not torch.strided:
            return tensor
        whole = tensor.untyped_storage()
        for arena in self._arenas:
            if (start := arena.find(whole.data_ptr())) is not None:
                flat = torch.from_numpy(arena.memory[start : start + whole.nbytes()]).view(tensor.dtype)
                return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return tensor

    def _place(self, size: int) -> tuple[Arena, int]:
        for arena in self._arenas:
            if (start := arena.take_bytes(size)) is not None:
                return arena, start
        arena = Arena(max(size, self._arena_bytes))
        self._arenas.append(arena)
        start = arena.take_bytes(size)
        assert start is not None, "as large as asked for"
        return arena, start
