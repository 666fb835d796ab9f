"""Memory for the tensors of captured graphs: it comes back when a tensor is gone, as while the function runs."""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor


class MemoryPool:
    """Gives out tensors whose memory stays allocated for good; what a graph reads at replay lies there.

    A tensor whose last view is gone leaves its memory to the next of its size, so graphs that never run at the same
    time share it, and all of them together take about the memory of the largest.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self.nbytes = 0

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialised dense tensor on the CPU."""
        size = shape.numel() * dtype.itemsize
        # one array per size keeps a replay's addresses together
        free = self._free[size]
        block = free.pop() if free else self._allocate(size)
        # torch holds this view until no tensor uses its memory
        lent = block[:]
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _allocate(self, size: int) -> np.ndarray:
        self.nbytes += size
        # a line of the cache, and the width of the widest vectors
        whole = np.empty(size + 64, np.uint8)
        start = -whole.ctypes.data % 64
        return whole[start : start + size]
