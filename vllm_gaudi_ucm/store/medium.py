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

    deadline: Annotated[float, Field(gt=0)] = Field(
        default=0.5,
        description="Seconds that a call may take; after them it is a miss, or a block that is not saved.",
    )
    io_threads: Annotated[int, Field(ge=1, le=64)] = Field(
        default=4, description="Threads that talk to the medium: most calls at once, also where it is stuck."
    )
    breaker: BreakerOptions = Field(default=BreakerOptions(), description="Circuit breaker.")


REFUSED = -1
"""In place of a record's length: the medium answers, but not with this record."""


class RefusedError(OSError):
    """The medium answers but does not take this block; what it holds can still be loaded."""


class FullError(RefusedError):
    """It takes no block at all: full, or read-only."""


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
    """Of blocks that `read_many` does well to take at once: see `KvStore.batch_bytes`."""
    evictions: int = 0
    """Blocks that made room for others, as far as this process did it."""
    untouched: int = 0
    """Blocks that were there and could not be marked as used: their order, or their time, is the one before."""

    @abstractmethod
    def place(self) -> str:
        """Where it is, for people; no password."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes], block_bytes: int) -> list[bool]:
        """Which of them lie there in full length."""

    @abstractmethod
    def keep(self, key: bytes, block_bytes: int) -> bool:
        """Whether it lies there in full length; if so, as if it had just been used."""

    @abstractmethod
    def read(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        """Reads into `record` (header and block); its length as found, of which more does not fit, None: a miss.

        As if the block had just been used, which may fail without harm to the read: see `untouched`. May be `REFUSED`.
        """

    @abstractmethod
    def peek(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        """As `read`, for someone who only looks: order of use and time to live stay as they are."""

    def strangers(self) -> list[str]:
        """What lies where blocks belong and is none, as far as it was met: left alone, in words for people."""
        return []

    def read_many(self, keys: Sequence[bytes], block_bytes: int, records: Sequence[memoryview]) -> Iterator[int | None]:
        """As `read`, of each key into its record, one after the other as the results are asked for."""
        for key, record in zip(keys, records, strict=True):
            yield self.read(key, block_bytes, record)

    @abstractmethod
    def write(self, key: bytes, record: memoryview) -> bool:
        """Puts a record in place in one piece, over one of the wrong length too; False if someone else just has.

        Raises RefusedError for this block alone, FullError where there is no room or nothing can be written.
        """

    @abstractmethod
    def delete(self, blocks: Sequence[StoredBlock]) -> int:
        """Removes them; returns how many were there."""

    @abstractmethod
    def blocks(self, block_bytes: int | None = None) -> Iterator[StoredBlock]:
        """What lies there, of one size or of all."""

    @abstractmethod
    def usage(self, block_bytes: int) -> Usage:
        """What lies there, as of the last upkeep and this process's doings since. Never waits."""

    @abstractmethod
    def upkeep(self) -> None:
        """What has to be done every `upkeep_seconds` of use: see what others did, tidy up."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AssertionError where its books do not agree with themselves."""

    @abstractmethod
    def close(self) -> None:
        """Ends connections. A second call does nothing."""


Progress = Callable[[float], None]
"""Called with the fraction that is done."""
_BATCH = 256


class Verified(NamedTuple):
    """How many blocks were what they should be; the others are removed."""

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
