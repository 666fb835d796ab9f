"""Buffers of one record each, used again and again."""

from __future__ import annotations

from collections.abc import Callable

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.store.base import HEADER_BYTES, Counts, is_intact
from vllm_gaudi_ucm.store.io_threads import Job
from vllm_gaudi_ucm.store.medium import REFUSED, Medium, StoredBlock


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


def can_pin() -> bool:
    """Whether there is a device that copies faster from page-locked memory."""
    from vllm_gaudi_ucm.device import get_device
    from vllm_gaudi_ucm.device.detect import detect_device

    kind = detect_device()
    return kind is not None and get_device(kind).pins_host_memory


Found = list[memoryview | None]
"""Whole records, None for a miss."""

logger = plugin_logger(__name__)


class RecordReader:
    """Of blocks of `block_bytes` bytes. Corrupt ones are removed and counted."""

    def __init__(self, medium: Medium, block_bytes: int, records: RecordPool, counts: Counts) -> None:
        self._medium = medium
        self._block_bytes = block_bytes
        self._records = records
        self._counts = counts

    def read(self, job: Job[Found], keys: list[bytes], records: list[memoryview]) -> Found:
        """In an I/O thread. Takes all of `records` from the caller, who may not touch them any more, gone or not, until
        they come back: those with verified blocks as the result, the others to the pool."""
        with job.handover():
            taken, records[:] = list(records), []
        found: Found = []
        try:
            sizes = self._medium.read_many(keys, self._block_bytes, taken)
            for key, record, size in zip(keys, taken, sizes, strict=True):
                found.append(record if self._is_whole(key, record, size) else None)
            with job.handover():
                return found
        except BaseException:
            found = []
            raise
        finally:
            kept = {id(record) for record in found}
            for record in taken:
                if id(record) not in kept:
                    self._records.give(record)

    def _is_whole(self, key: bytes, record: memoryview, size: int | None) -> bool:
        """Whether it is the block that was saved; removed if it is not."""
        if size == REFUSED:
            self._counts.add(errors=1)
        if size is None or size == REFUSED:
            return False
        if size == len(record) and is_intact(record, key):
            return True
        self._counts.add(corrupt=1)
        try:
            self._medium.delete([StoredBlock(key, self._block_bytes)])
            logger.warning("%s: removed a corrupt block, %s", self._medium.place(), key.hex())
        except self._medium.errors as error:  # it stays a miss, and the others of the call are read
            self._counts.add(errors=1)
            logger.warning("%s: a corrupt block stays, %s: %s", self._medium.place(), key.hex(), error)
        return False
