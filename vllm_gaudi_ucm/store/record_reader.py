"""Records from a medium into buffers that their reader owns, verified one by one."""

from __future__ import annotations

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.store.counts import Counts
from vllm_gaudi_ucm.store.io_threads import Job
from vllm_gaudi_ucm.store.medium import REFUSED, Medium, StoredBlock
from vllm_gaudi_ucm.store.record import is_intact
from vllm_gaudi_ucm.store.record_pool import RecordPool

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
