"""A store on top of a medium: deadline, circuit breaker, checksums and counters, the same for every medium."""

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.store.base import (
    HEADER_BYTES,
    ConfiguredStore,
    Counts,
    KvStore,
    Loan,
    StoreStats,
    block_view,
    check_block_bytes,
    check_keys,
    seal,
)
from vllm_gaudi_ucm.store.io_threads import DeadlineExceededError, IoThreads, Job
from vllm_gaudi_ucm.store.medium import (
    FullError,
    Medium,
    MediumOptions,
    RefusedError,
    StoredBlock,
    clear_blocks,
    verify_blocks,
)
from vllm_gaudi_ucm.store.records import RecordPool, RecordReader, can_pin

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """A circuit breaker. Closed: calls pass. Open: none passes. Half open: one passes, and decides. Thread-safe."""

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = failures
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0  # failures in a row
        self._opened: float | None = None
        self._trying = False

    @property
    def state(self) -> BreakerState:
        """The state; `half_open` from the moment that a call may try again until its outcome decides."""
        with self._lock:
            return self._state()

    def allow(self) -> bool:
        """True if a call may go through; after True exactly one of `succeeded`, `failed` must follow."""
        with self._lock:
            state = self._state()
            if state == "half_open" and not self._trying:
                self._trying = True
                return True
            return state == "closed"

    def succeeded(self) -> None:
        with self._lock:
            # an answer to a call from before the breaker opened tells nothing about now, but does no harm either
            self._failures, self._opened, self._trying = 0, None, False

    def failed(self) -> bool:
        """Records that a call failed or took too long. True if this opened the breaker."""
        with self._lock:
            was_closed = self._opened is None
            self._failures += 1
            if self._failures < self._most:
                return False
            self._opened, self._trying = self._clock(), False
            return was_closed

    def _state(self) -> BreakerState:
        if self._opened is None:
            return "closed"
        return "half_open" if self._trying or self._clock() - self._opened >= self._seconds else "open"


logger = plugin_logger(__name__)
Result = TypeVar("Result")


class CallGuard:
    """A circuit breaker for a few I/O threads. Failures and time-outs are counted in `counts` and logged once."""

    def __init__(
        self,
        medium: Medium,
        options: MediumOptions,
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._medium = medium
        self._deadline = options.deadline
        self._counts = counts
        self._breaker = Breaker(options.breaker.failures, options.breaker.seconds, clock)
        self._threads = IoThreads(f"ucm-store-{medium.kind}", options.io_threads)
        self._closed = False
        self._said: set[type[RefusedError]] = set()

    @property
    def state(self) -> BreakerState:
        return self._breaker.state

    def call(self, function: Callable[[Job[Result]], Result], deadline: float | None = None) -> Result | None:
        """Runs `function(job)` in an I/O thread and returns its result; None if it failed, took too long, or was not
        let through.

        Raises RuntimeError after `close`.
        """
        self.check_open()
        if not self._breaker.allow():
            return None
        try:
            result = self._threads.call(function, self._deadline if deadline is None else deadline)
        except DeadlineExceededError as error:
            self._counts.add(timeouts=1)
            self._failed(error)
            return None
        except RefusedError as error:
            self._counts.add(errors=1)
            self._breaker.succeeded()  # it answers: its blocks can still be loaded
            self._say_once(error)
            return None
        except Exception as error:
            self._failed(error)
            self.check_open()  # another thread closed it in the meantime
            self._counts.add(errors=1)
            return None
        except BaseException:
            self._breaker.failed()  # interrupted; without this a trial call would never be decided
            raise
        self._breaker.succeeded()
        return result

    def call_unhurried(self, function: Callable[[], Result]) -> Result | None:
        """Like `call`, in the caller's thread and without a deadline: for work that grows with the number of blocks."""
        self.check_open()
        try:
            return function()
        except self._medium.errors as error:
            self._counts.add(errors=1)
            logger.warning("%s: %s: %s", self._medium.place(), type(error).__name__, error)
            return None

    def begin(self, function: Callable[[], None]) -> None:
        """Runs `function` in an I/O thread and returns at once; what it raises is lost. Does nothing after `close`."""
        if not self._closed:
            try:
                self._threads.begin(function)
            except RuntimeError:
                logger.debug("%s was closed in the meantime", self._medium.place())

    def check_open(self) -> None:
        """Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError(f"the {self._medium.kind} store is closed")

    def close(self) -> bool:
        """Ends the threads, within the deadline; False if they were ended before."""
        if self._closed:
            return False
        self._closed = True
        if not self._threads.close(self._deadline):
            logger.warning("%s does not answer: its threads will end on their own", self._medium.place())
        return True

    def _say_once(self, error: RefusedError) -> None:
        if type(error) not in self._said:
            self._said.add(type(error))
            what = "takes no more blocks" if isinstance(error, FullError) else "does not take a block"
            logger.warning("%s %s(logged once): %s", self._medium.place(), what, error)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, (*self._medium.errors, DeadlineExceededError)):
            logger.error("%s: an error of the plugin", self._medium.place(), exc_info=error)
        if self._breaker.failed():
            what = f"{type(error).__name__}: {error}"
            logger.warning("%s keeps failing and is not used for a while: %s", self._medium.place(), what)


FIRST_UPKEEP_SECONDS = 5.0
"""How long opening waits for the first upkeep; a large folder on a slow disk is indexed in the background."""
_USES_AT_ONCE = 64
"""Blocks that one call of the medium marks as used."""


class GuardedStore(KvStore):
    """Blocks of `block_bytes` bytes in a medium. Callers wait until the deadline at most, even if the medium hangs."""

    def __init__(
        self,
        medium: Medium,
        block_bytes: int,
        options: MediumOptions,
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
        # in the caller's thread, whose device is the one that memory is page-locked for
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
        """Returns `count` buffers; none if the system has no memory."""
        records: list[memoryview] = []
        try:
            while len(records) < count:
                records.append(self._records.take_record())
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

    def use(self, keys: Sequence[bytes]) -> None:
        self._guard.check_open()
        check_keys(keys)
        # each part within a deadline of its own
        for end in range(len(keys), 0, -_USES_AT_ONCE):
            part = list(keys[max(0, end - _USES_AT_ONCE) : end])
            if self._guard.call(lambda _: self._use(part)) is None:  # noqa: B023  # the call is over, or given up
                return

    def _use(self, keys: Sequence[bytes]) -> bool:
        self._medium.use(keys, self._block_bytes)
        return True

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
        """Raises AssertionError if the counts of the medium are inconsistent."""
        self._medium.check_integrity()

    def close(self) -> None:
        if self._guard.close():
            self._medium.close()

    def _write(self, job: Job[bool], key: bytes, block: memoryview) -> bool:
        """Writes a block, in an I/O thread; True if it is new. Writes from a copy, which no caller can change."""
        if self._medium.keep(key, self._block_bytes):
            return False
        record = self._own_record()
        with job.handover():
            _copy(record[HEADER_BYTES:], block)
        seal(record, key)
        return self._medium.write(key, record)

    def _own_record(self) -> memoryview:
        """Returns this I/O thread's own buffer for one record."""
        if not hasattr(self._buffers, "record"):
            self._buffers.record = memoryview(bytearray(HEADER_BYTES + self._block_bytes))
        record: memoryview = self._buffers.record
        return record

    def _blocks(self) -> list[StoredBlock]:
        return list(self._medium.blocks(self._block_bytes))

    def _begin_upkeep(self) -> None:
        """Starts the medium's upkeep in an I/O thread, if it is due."""
        if time.monotonic() >= self._next_upkeep and self._guard.state == "closed":
            self._next_upkeep = time.monotonic() + self._medium.upkeep_seconds
            self._guard.begin(self._upkeep)

    def _upkeep(self) -> None:
        if self._upkeep_lock.acquire(blocking=False):  # one at a time
            try:
                self._medium.upkeep()
            finally:
                self._next_upkeep = time.monotonic() + self._medium.upkeep_seconds
                self._upkeep_lock.release()


class MediumStore(GuardedStore, ConfiguredStore):
    """Base of the configured stores on top of a medium. A subclass names its options and opens its medium."""

    Options: ClassVar[type[MediumOptions]]

    @classmethod
    @abstractmethod
    def open_medium(cls, options: Any, create: bool = True, evicts: bool = True) -> Medium:
        """See `open_medium` of `store/factory.py`. options: an object of the class `Options`."""

    @classmethod
    def open(cls, options: Any, block_bytes: int, evicts: bool = True) -> Self:
        medium = cls.open_medium(options, evicts=evicts)
        try:
            return cls(medium, block_bytes, options, can_pin=can_pin)
        except ValueError:
            medium.close()
            raise


def _copy(target: memoryview, source: memoryview) -> None:
    # numpy lets other threads run during the copy; a slice assignment of memoryviews does not
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
