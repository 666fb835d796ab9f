"""The interface of a medium outside the process: records by key, without protection from its faults."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.store.base import HEADER_BYTES, StoreOptions, is_intact


class BreakerOptions(Section):
    """Options of the circuit breaker, which stops using a store that keeps failing."""

    failures: Annotated[int, Field(ge=1)] = Field(
        default=3, description="Failures and time-outs in a row after which the store is not asked any more."
    )
    seconds: Annotated[float, Field(gt=0)] = Field(
        default=10.0, description="Time until one call tries it again; if that fails, the time begins anew."
    )


class MediumOptions(StoreOptions):
    """Base of the options of a store whose medium can be slow or gone."""

    deadline: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=0.5,
        description="Seconds that a call may take; after them it is a miss, or a block that is not saved.",
    )
    io_threads: Annotated[int, Field(ge=1, le=64)] = Field(
        default=4, description="Threads that talk to the medium: most calls at once, also where it is stuck."
    )
    breaker: BreakerOptions = Field(default=BreakerOptions(), description="Circuit breaker.")


REFUSED = -1
"""Returned instead of a record's length: the medium answers, but not with this record."""


class RefusedError(OSError):
    """Raised if the medium answers but refuses this block; its other blocks can still be loaded."""


class FullError(RefusedError):
    """Raised if the medium takes no block at all, because it is full or read-only."""


class StoredBlock(NamedTuple):
    """A block in a medium."""

    key: bytes
    block_bytes: int


class Usage(NamedTuple):
    """The content of a medium, in blocks and in their bytes without headers, and the most bytes it may hold."""

    blocks: int
    bytes: int
    capacity: int | None


class Collected(NamedTuple):
    """Blocks that garbage collection has removed, and their bytes."""

    blocks: int
    bytes: int


class Medium(ABC):
    """Holds records of several block sizes. Methods wait as long as the medium does, may be called from several threads
    at once, and raise OSError or one of `errors` for all failures.
    """

    kind: str
    upkeep_seconds: float
    errors: tuple[type[Exception], ...] = (OSError,)
    batch_bytes: int = 0
    """Bytes of blocks to request in one call of `read_many`: see `KvStore.batch_bytes`."""
    evictions: int = 0
    """Blocks that this process has removed to make room."""
    untouched: int = 0
    """Blocks that were found but not marked as used: their age, or their time to live, did not change."""

    @abstractmethod
    def place(self) -> str:
        """The place of the medium, for messages; without passwords."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes], block_bytes: int) -> list[bool]:
        """Returns which keys have a record of full length."""

    @abstractmethod
    def keep(self, key: bytes, block_bytes: int) -> bool:
        """Like `lookup` of one key, which counts as a use of the block."""

    @abstractmethod
    def read(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        """Reads into `record` (header and block). Returns the length found, which may be another than the record's, or
        `REFUSED`; None for a miss.

        Counts as a use of the block. If the use cannot be recorded, the read still succeeds: see `untouched`.
        """

    @abstractmethod
    def peek(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        """Like `read`, without counting as a use: order of use and time to live stay as they are."""

    def strangers(self) -> list[str]:
        """Returns, in words, the entries in the place of a block that are not blocks; they are not touched."""
        return []

    def read_many(self, keys: Sequence[bytes], block_bytes: int, records: Sequence[memoryview]) -> Iterator[int | None]:
        """Like `read` for each key and its record, one by one as the results are consumed."""
        for key, record in zip(keys, records, strict=True):
            yield self.read(key, block_bytes, record)

    @abstractmethod
    def write(self, key: bytes, record: memoryview) -> bool:
        """Puts a record in place atomically, also over one of another length; False if another process just did.

        Raises RefusedError if this block is refused, FullError if there is no room or no block can be written.
        """

    def use(self, keys: Sequence[bytes], block_bytes: int) -> None:  # noqa: B027  # Redis has a clock of seconds
        """Counts as a use of the blocks that are there, the last one first; does nothing in a medium whose order of
        use is too coarse to tell the blocks of a prompt apart.
        """

    @abstractmethod
    def delete(self, blocks: Sequence[StoredBlock]) -> int:
        """Removes blocks; returns how many were there."""

    @abstractmethod
    def blocks(self, block_bytes: int | None = None) -> Iterator[StoredBlock]:
        """The stored blocks, of one size or of all."""

    @abstractmethod
    def usage(self, block_bytes: int) -> Usage:
        """Returns the content of the medium, as of the last upkeep and this process's changes since. Never waits."""

    @abstractmethod
    def upkeep(self) -> None:
        """Does housekeeping, every `upkeep_seconds` of use: finds changes of other processes, evicts, cleans up."""

    def collect(self, most_bytes: int | None, max_age: float | None) -> Collected:
        """Removes the least recently used blocks until `most_bytes` remain, and blocks that were not used for `max_age`
        seconds; None does not bound. Blocks that another process uses in the meantime stay.

        Raises ValueError if the medium removes blocks by itself only.
        """
        raise ValueError(f"{self.place()}: gc is not supported, because it removes blocks by its own rules")

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AssertionError if its counts are inconsistent."""

    @abstractmethod
    def close(self) -> None:
        """Ends connections. A second call does nothing."""


Progress = Callable[[float], None]
"""Called with the fraction of the work that is done."""
_BATCH = 256


class Verified(NamedTuple):
    """Numbers of intact blocks and of corrupt ones, which are removed."""

    intact: int
    corrupt: int


def verify_blocks(medium: Medium, blocks: Sequence[StoredBlock], progress: Progress | None = None) -> Verified:
    """Reads every block; removes the corrupt ones. A block that is gone, or cannot be read, counts as neither. Order of
    use and time to live do not change.
    """
    intact = corrupt = 0
    buffer = bytearray()
    for done, block in enumerate(blocks, start=1):
        size = HEADER_BYTES + block.block_bytes
        if len(buffer) < size:
            buffer = bytearray(size)
        record = memoryview(buffer)[:size]
        found = medium.peek(block.key, block.block_bytes, record)
        if found == size and is_intact(record, block.key):
            intact += 1
        elif found is not None and found != REFUSED:
            corrupt += medium.delete([block])
        if progress is not None:
            progress(done / len(blocks))
    return Verified(intact, corrupt)


def clear_blocks(medium: Medium, blocks: Sequence[StoredBlock], progress: Progress | None = None) -> int:
    """Removes the blocks; returns how many were there."""
    removed = 0
    for start in range(0, len(blocks), _BATCH):
        batch = blocks[start : start + _BATCH]
        removed += medium.delete(batch)
        if progress is not None:
            progress((start + len(batch)) / len(blocks))
    return removed
