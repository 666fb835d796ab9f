"""Buffers of one record each, used again and again."""

from __future__ import annotations

from collections.abc import Callable

from vllm_gaudi_ucm.store.record import HEADER_BYTES


class RecordPool:
    """As many buffers as were in use at once; one that never comes back is replaced. Safe between threads.

    pinned: whether memory is to be page-locked, asked once, when the first buffer is made.
    """

    def __init__(self, block_bytes: int, pinned: Callable[[], bool]) -> None:
        self._size = HEADER_BYTES + block_bytes
        self._pinned = pinned
        self._is_pinned: bool | None = None
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """A buffer of header and block, with whatever was in it. Raises MemoryError or RuntimeError without memory."""
        try:
            return self._free.pop()
        except IndexError:
            return self._new()

    def give(self, record: memoryview) -> None:
        """The buffer is nobody's again."""
        self._free.append(record)

    def _new(self) -> memoryview:
        if self._is_pinned is None:
            self._is_pinned = self._pinned()
        if not self._is_pinned:
            return memoryview(bytearray(self._size))
        import torch

        # an array is a buffer, which numpy's stubs say from Python 3.12 on
        return memoryview(torch.empty(self._size, dtype=torch.uint8, pin_memory=True).numpy())  # type: ignore[arg-type]
