"""A store over a medium: deadline, circuit breaker, checksums and counters, the same for every medium."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.store.arguments import block_view, check_block_bytes, check_keys
from vllm_gaudi_ucm.store.base import KvStore, StoreStats
from vllm_gaudi_ucm.store.call_guard import CallGuard
from vllm_gaudi_ucm.store.counts import Counts
from vllm_gaudi_ucm.store.io_threads import Job
from vllm_gaudi_ucm.store.loan import Loan
from vllm_gaudi_ucm.store.medium import Medium, StoredBlock
from vllm_gaudi_ucm.store.medium_check import clear_blocks, verify_blocks
from vllm_gaudi_ucm.store.options import FileStoreOptions, RedisStoreOptions
from vllm_gaudi_ucm.store.record import HEADER_BYTES, seal
from vllm_gaudi_ucm.store.record_pool import RecordPool
from vllm_gaudi_ucm.store.record_reader import RecordReader

logger = plugin_logger(__name__)
FIRST_UPKEEP_SECONDS = 5.0
"""How long opening waits for a look at what is there; a large folder on a slow disk is looked at beside the work."""


class GuardedStore(KvStore):
    """Blocks of `block_bytes` bytes in a medium. A caller waits for the deadline at most, whatever the medium does."""

    def __init__(
        self,
        medium: Medium,
        block_bytes: int,
        options: FileStoreOptions | RedisStoreOptions,
        clock: Callable[[], float] = time.monotonic,
        can_pin: Callable[[], bool] = lambda: False,
    ) -> None:
        check_block_bytes(block_bytes, medium.usage(block_bytes).capacity)
        self._medium = medium
        self._block_bytes = block_bytes
        self._counts = Counts(medium.kind)
        self._guard = CallGuard(medium, options, self._counts, clock)
        self._buffers = threading.local()
        self._records = RecordPool(block_bytes, can_pin)
        self._reader = RecordReader(medium, block_bytes, self._records, self._counts)
        self.batch_bytes = medium.batch_bytes
        self._upkeep_lock = threading.Lock()
        self._next_upkeep = 0.0
        self._guard.call(lambda _: self._upkeep(), max(options.deadline, FIRST_UPKEEP_SECONDS))

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        self._guard.check_open()
        check_keys(keys)
        if not keys:
            return []
        wanted = list(keys)
        found = self._guard.call(lambda _: self._medium.lookup(wanted, self._block_bytes))
        answer = [False] * len(keys) if found is None else found
        self._counts.add(misses=answer.count(False))
        return answer

    def load(self, key: bytes, into: memoryview) -> bool:
        view = block_view("into", into, self._block_bytes, writable=True)
        (loan,) = self.lend([key])
        if loan is None:
            return False
        with loan as block:
            _copy(view, block)
        return True

    def lend(self, keys: Sequence[bytes]) -> list[AbstractContextManager[memoryview] | None]:
        self._guard.check_open()
        check_keys(keys)
        if not keys:
            return []
        begin = time.perf_counter()
        # in the caller's thread, whose device is the one that page-locked memory is for
        wanted, records = list(keys), self._take_records(len(keys))
        found = None
        if records:
            found = self._guard.call(lambda job: self._reader.read(job, wanted, records))
        found = found or [None] * len(wanted)
        for record in records:
            self._records.give(record)
        hits = len(found) - found.count(None)
        if hits:
            seconds = time.perf_counter() - begin
            self._counts.add(hits=hits, bytes_loaded=hits * self._block_bytes, load_seconds=seconds)
        if hits < len(found):
            self._counts.add(misses=len(found) - hits)
        return [None if record is None else self._loan(record) for record in found]

    def _take_records(self, count: int) -> list[memoryview]:
        """As many buffers, none where the system gives no memory for them."""
        records: list[memoryview] = []
        try:
            while len(records) < count:
                records.append(self._records.take())
        except (MemoryError, RuntimeError) as error:
            self._counts.add(errors=1)
            logger.warning("%s: the system gives no more memory: %s", self._medium.place(), str(error))
            for record in records:
                self._records.give(record)
            return []
        return records

    def _loan(self, record: memoryview) -> Loan:
        return Loan(record[HEADER_BYTES:].toreadonly(), lambda: self._records.give(record))

    def save(self, key: bytes, block: memoryview) -> bool:
        check_keys([key])
        view = block_view("block", block, self._block_bytes, writable=False)
        begin = time.perf_counter()
        is_new = self._guard.call(lambda job: self._write(job, key, view))
        if is_new:
            self._counts.add(saves=1, bytes_saved=self._block_bytes, save_seconds=time.perf_counter() - begin)
            self._begin_upkeep()
        return is_new is not None

    def delete(self, keys: Sequence[bytes]) -> int:
        check_keys(keys)
        blocks = [StoredBlock(key, self._block_bytes) for key in keys]
        return self._guard.call(lambda _: self._medium.delete(blocks)) or 0

    def clear(self) -> int:
        return self._guard.call_unhurried(lambda: clear_blocks(self._medium, self._blocks())) or 0

    def verify(self) -> tuple[int, int]:
        found = self._guard.call_unhurried(lambda: verify_blocks(self._medium, self._blocks()))
        if found is None:
            return 0, 0
        self._counts.add(corrupt=found.corrupt)
        return found

    def stats(self) -> StoreStats:
        self._begin_upkeep()
        blocks, size, capacity = self._medium.usage(self._block_bytes)
        state = {"blocks": blocks, "bytes": size, "capacity": capacity, "evictions": self._medium.evictions}
        return self._counts.stats(breaker=self._guard.state, untouched=self._medium.untouched, **state)

    def check_integrity(self) -> None:
        """Raises AssertionError where the books of the medium do not agree with themselves."""
        self._medium.check_integrity()

    def close(self) -> None:
        if self._guard.close():
            self._medium.close()

    def _write(self, job: Job[bool], key: bytes, block: memoryview) -> bool:
        """In an I/O thread; whether the block is new. It writes from a copy, which no caller can change meanwhile."""
        if self._medium.keep(key, self._block_bytes):
            return False
        record = self._own_record()
        with job.handover():
            _copy(record[HEADER_BYTES:], block)
        seal(record, key)
        return self._medium.write(key, record)

    def _own_record(self) -> memoryview:
        """This I/O thread's own buffer of one record."""
        if not hasattr(self._buffers, "record"):
            self._buffers.record = memoryview(bytearray(HEADER_BYTES + self._block_bytes))
        record: memoryview = self._buffers.record
        return record

    def _blocks(self) -> list[StoredBlock]:
        return list(self._medium.blocks(self._block_bytes))

    def _begin_upkeep(self) -> None:
        """Has the medium looked after beside the work, if it is time."""
        if time.monotonic() >= self._next_upkeep and self._guard.state == "closed":
            self._next_upkeep = time.monotonic() + self._medium.upkeep_seconds
            self._guard.begin(self._upkeep)

    def _upkeep(self) -> None:
        if self._upkeep_lock.acquire(blocking=False):  # one at once
            try:
                self._medium.upkeep()
            finally:
                self._next_upkeep = time.monotonic() + self._medium.upkeep_seconds
                self._upkeep_lock.release()


def _copy(target: memoryview, source: memoryview) -> None:
    # numpy lets other threads run meanwhile; a slice assignment of memoryviews does not
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
