"""The interface of a medium outside of the process: records by key, without protection from what the medium does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.store.base import HEADER_BYTES, StoreOptions, is_intact


class BreakerOptions(Section):
    """When a store that keeps failing is left alone."""

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
"""Instead of a record's length: the medium answers, but not with this record."""


class RefusedError(OSError):
    """The medium answers but does not take this block; what it holds can still be loaded."""


class FullError(RefusedError):
    """The medium takes no block at all: it is full or read-only."""


class StoredBlock(NamedTuple):
    """A block that lies in a medium."""

    key: bytes
    block_bytes: int


class Usage(NamedTuple):
    """What a medium holds, in blocks and in their bytes without headers, and the most bytes it may hold."""

    blocks: int
    bytes: int
    capacity: int | None


class Medium(ABC):
    """Holds records of several block sizes. Methods wait as long as the medium does, may be called from
    several threads at once, and raise OSError or one of `errors` for whatever goes wrong.
    """

    kind: str
    upkeep_seconds: float
    errors: tuple[type[Exception], ...] = (OSError,)
    batch_bytes: int = 0
    """Bytes of blocks worth one call of `read_many`: see `KvStore.batch_bytes`."""
    evictions: int = 0
    """Blocks that this process has removed to make room."""
    untouched: int = 0
    """Blocks that were found but not marked as used: their age, or their time to live, did not change."""

    @abstractmethod
    def place(self) -> str:
        """Where the medium is, for messages; without passwords."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes], block_bytes: int) -> list[bool]:
        """Which keys have a record of full length."""

    @abstractmethod
    def keep(self, key: bytes, block_bytes: int) -> bool:
        """Like `lookup` of one key, which counts as a use of the block."""

    @abstractmethod
    def read(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        """Reads into `record` (header and block). Returns the length found, which may be another than the record's, or
        `REFUSED`; None for a miss.

        Counts as a use of the block. Where that cannot be noted the read still succeeds: see `untouched`.
        """

    @abstractmethod
    def peek(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        """Like `read`, without counting as a use: order of use and time to live stay as they are."""

    def strangers(self) -> list[str]:
        """Things met in the place of a block that are none, in words; they are left alone."""
        return []

    def read_many(self, keys: Sequence[bytes], block_bytes: int, records: Sequence[memoryview]) -> Iterator[int | None]:
        """Like `read` for each key and its record, one by one as the results are consumed."""
        for key, record in zip(keys, records, strict=True):
            yield self.read(key, block_bytes, record)

    @abstractmethod
    def write(self, key: bytes, record: memoryview) -> bool:
        """Puts a record in place atomically, also over one of another length; False if another process just did.

        Raises RefusedError where this block is refused, FullError if there is no room or no block can be written.
        """

    @abstractmethod
    def delete(self, blocks: Sequence[StoredBlock]) -> int:
        """Removes blocks; returns how many were there."""

    @abstractmethod
    def blocks(self, block_bytes: int | None = None) -> Iterator[StoredBlock]:
        """The stored blocks, of one size or of all."""

    @abstractmethod
    def usage(self, block_bytes: int) -> Usage:
        """What the medium holds, as of the last upkeep and this process's changes since. Never waits."""

    @abstractmethod
    def upkeep(self) -> None:
        """Housekeeping, every `upkeep_seconds` of use: notice what other processes did, evict, clean up."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AssertionError where its counts are inconsistent."""

    @abstractmethod
    def close(self) -> None:
        """Ends connections. A second call does nothing."""


Progress = Callable[[float], None]
"""Called with the fraction that is done."""
_BATCH = 256


class Verified(NamedTuple):
    """Numbers of intact blocks and of corrupt ones, which are removed."""

    intact: int
    corrupt: int


def verify_blocks(medium: Medium, blocks: Sequence[StoredBlock], progress: Progress | None = None) -> Verified:
    """Reads every block; removes the corrupt ones. One that has gone, or cannot be read, counts as neither.

    Order of use and time to live stay what they are.
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
