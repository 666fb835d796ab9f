"""Reusable buffers of one record each, and reading records into them."""

from collections.abc import Callable

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.store.base import HEADER_BYTES, Counts, is_intact
from vllm_gaudi_ucm.store.io_threads import Job
from vllm_gaudi_ucm.store.medium import REFUSED, Medium, StoredBlock


class RecordPool:
    """A free list of buffers; it grows to the number in use at once. Thread-safe.

    pinned: whether to page-lock memory; called once, when the first buffer is made.
    """

    def __init__(self, block_bytes: int, pinned: Callable[[], bool]) -> None:
        self._size = HEADER_BYTES + block_bytes
        self._pinned = pinned
        self._is_pinned: bool | None = None
        self._free: list[memoryview] = []

    def take_record(self) -> memoryview:
        """Takes a buffer for header and block, with undefined content. Raises MemoryError or RuntimeError."""
        try:
            return self._free.pop()
        except IndexError:
            return self._new()

    def give(self, record: memoryview) -> None:
        """Returns a buffer to the pool."""
        self._free.append(record)

    def _new(self) -> memoryview:
        if self._is_pinned is None:
            self._is_pinned = self._pinned()
        if not self._is_pinned:
            return memoryview(bytearray(self._size))
        import torch

        # an array is a buffer; numpy's stubs declare it from Python 3.12
        return memoryview(torch.empty(self._size, dtype=torch.uint8, pin_memory=True).numpy())  # type: ignore[arg-type]


def can_pin() -> bool:
    """True if there is a device that copies faster from page-locked memory."""
    from vllm_gaudi_ucm.device import get_device
    from vllm_gaudi_ucm.device.detect import detect_device

    kind = detect_device()
    return kind is not None and get_device(kind).pins_host_memory


Found = list[memoryview | None]
"""A list of whole records, with None for a miss."""

logger = plugin_logger(__name__)


class RecordReader:
    """Reads and verifies blocks of `block_bytes` bytes. Removes and counts corrupt blocks."""

    def __init__(self, medium: Medium, block_bytes: int, records: RecordPool, counts: Counts) -> None:
        self._medium = medium
        self._block_bytes = block_bytes
        self._records = records
        self._counts = counts

    def read(self, job: Job[Found], keys: list[bytes], records: list[memoryview]) -> Found:
        """Reads blocks, in an I/O thread. Takes all of `records` from the caller, even if it has stopped waiting.

        Records with verified blocks come back as the result, the others go back to the pool.
        """
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
        """True if the record is the block that was saved; a corrupt one is removed."""
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
        except self._medium.errors as error:  # it stays a miss; the other blocks of the call are read
            self._counts.add(errors=1)
            logger.warning("%s: a corrupt block stays, %s: %s", self._medium.place(), key.hex(), error)
        return False
