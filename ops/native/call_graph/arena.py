"""A range of addresses that memory is lent from, the lowest that is free first."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

# a line of the cache, and the width of the widest vectors
_ALIGNMENT = 64


class Arena:
    """The kernel provides a page when it is written to: an arena takes as much memory as was ever reached in it.

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
        # in order, and apart from each other
        self._gaps = [(0, len(self.memory))]

    def take(self, size: int) -> int | None:
        """Lends so many bytes from the start that is returned; None where no gap is large enough."""
        size = _aligned(size)
        for index, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                self._gaps[index : index + 1] = [(start + size, end)] if end - start > size else []
                self._lent[start] = start + size
                self.reached = max(self.reached, start + size)
                return start
        return None

    def give_back(self, start: int) -> None:
        """Of what `take` returned."""
        joined: list[tuple[int, int]] = []
        for begin, end in sorted([*self._gaps, (start, self._lent.pop(start))]):
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((begin, end))
        self._gaps = joined

    def find(self, address: int) -> int | None:
        """The start of an address in here, None for any other."""
        start = address - self._address
        return start if 0 <= start < len(self.memory) else None


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
