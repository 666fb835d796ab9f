"""Host memory in slots of one block each, taken from the system slab by slab."""

from __future__ import annotations

import numpy as np

_SLAB_BYTES = 64 << 20


class SlotPool:
    """At most `capacity` bytes in slots of `block_bytes`. Not safe between threads by itself.

    pinned: page-locked memory of torch, which a device can copy beside the host's own work.
    """

    def __init__(self, block_bytes: int, capacity: int, pinned: bool) -> None:
        self._block_bytes = block_bytes
        self._pinned = pinned
        self._most = capacity // block_bytes
        self._slab_slots = max(1, min(_SLAB_BYTES // block_bytes, self._most))
        self._slabs: list[np.ndarray] = []
        self._free: list[int] = []
        self._allocated = 0

    @property
    def allocated(self) -> int:
        """Slots that memory was taken for."""
        return self._allocated

    @property
    def free(self) -> int:
        """Slots of these that nobody has."""
        return len(self._free)

    def take(self) -> int | None:
        """A slot, None where all are taken. Raises MemoryError or RuntimeError where the system gives no memory."""
        if not self._free and self._allocated < self._most:
            count = min(self._slab_slots, self._most - self._allocated)
            self._slabs.append(self._new_slab(count * self._block_bytes))
            self._free.extend(range(self._allocated + count - 1, self._allocated - 1, -1))
            self._allocated += count
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """The slot is nobody's again."""
        self._free.append(slot)

    def view(self, slot: int) -> np.ndarray:
        """uint8 [block_bytes]: the memory of a slot."""
        slab, place = divmod(slot, self._slab_slots)
        return self._slabs[slab][place * self._block_bytes : (place + 1) * self._block_bytes]

    def _new_slab(self, size: int) -> np.ndarray:
        if not self._pinned:
            return np.empty(size, np.uint8)
        import torch

        pinned: np.ndarray = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned
