"""Memory of the store `memory`, in slabs of many slots."""

from __future__ import annotations

import time

import numpy as np

from vllm_gaudi_ucm.logger import plugin_logger

logger = plugin_logger(__name__)
_SLAB_BYTES = 64 << 20


class SlotPool:
    """At most `capacity` bytes in slots of `block_bytes`. Not thread-safe.

    pinned: use page-locked memory of torch, which a device can copy while the host works. All of it is taken at once,
        as far as the system has it: each allocation takes milliseconds, and launches of kernels wait for it.
    """

    def __init__(self, block_bytes: int, capacity: int, pinned: bool) -> None:
        self._block_bytes = block_bytes
        self._pinned = pinned
        self._most = capacity // block_bytes
        self._slab_slots = max(1, min(_SLAB_BYTES // block_bytes, self._most))
        self._slabs: list[np.ndarray] = []
        self._free: list[int] = []
        self._allocated = 0
        if pinned:
            self._grow_at_start()

    @property
    def allocated(self) -> int:
        return self._allocated

    @property
    def free(self) -> int:
        """Returns the number of slots with memory that are not in use."""
        return len(self._free)

    def take_slot(self) -> int | None:
        """Takes a slot; None if all are taken. Raises MemoryError or RuntimeError if the system has no memory."""
        if not self._free and self._allocated < self._most:
            self._grow()
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def view(self, slot: int) -> np.ndarray:
        """Returns the memory of a slot, uint8 [block_bytes]."""
        slab, place = divmod(slot, self._slab_slots)
        return self._slabs[slab][place * self._block_bytes : (place + 1) * self._block_bytes]

    def _grow_at_start(self) -> None:
        begin, log, reason = time.perf_counter(), logger.info, "all that it may use"
        try:
            while self._allocated < self._most:
                self._grow()
        except (MemoryError, RuntimeError) as error:
            log, reason = logger.warning, f"the system has no more: {error}"
        self._free.sort(reverse=True)
        taken, seconds = self._allocated * self._block_bytes / 2**30, time.perf_counter() - begin
        log("memory store: %.2f GiB of page-locked memory in %.1f s, %s", taken, seconds, reason)

    def _grow(self) -> None:
        count = min(self._slab_slots, self._most - self._allocated)
        self._slabs.append(self._new_slab(count * self._block_bytes))
        self._free.extend(range(self._allocated + count - 1, self._allocated - 1, -1))
        self._allocated += count

    def _new_slab(self, size: int) -> np.ndarray:
        if not self._pinned:
            return np.empty(size, np.uint8)
        import torch

        pinned: np.ndarray = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned
