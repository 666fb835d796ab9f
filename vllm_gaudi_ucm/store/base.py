"""The interface of a store: KV blocks by key. A failing store misses; it never raises into a step."""

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, NamedTuple

import crc32c
import msgspec
from pydantic import Field

from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.store.block_key import KEY_BYTES


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the store was opened, and its current content. Bytes count blocks without headers.

    capacity: the most bytes it may hold, None for a server that bounds itself. hits: blocks loaded. front_hits: of
    these, the ones that memory in front of the store had. misses: keys that a lookup or a load did not find, or found
    corrupt. saves: blocks that were not there before. seconds: duration of these two.
    corrupt: blocks that failed their check. errors: calls that the medium refused, such as a save on a full disk.
    untouched: blocks that were there, and that could not be marked as used (a disk that became read-only).
    breaker: `open` while the store is not used because it kept failing; `half_open` for the trial after that.
    """

    kind: str
    blocks: int = 0
    bytes: int = 0
    capacity: int | None = None
    hits: int = 0
    front_hits: int = 0
    misses: int = 0
    saves: int = 0
    evictions: int = 0
    corrupt: int = 0
    errors: int = 0
    untouched: int = 0
    timeouts: int = 0
    bytes_loaded: int = 0
    bytes_saved: int = 0
    load_seconds: float = 0.0
    save_seconds: float = 0.0
    breaker: Literal["closed", "open", "half_open"] = "closed"


class KvStore(ABC):
    """Blocks of one size by a key of 32 bytes. Every method may be called from several threads at once.

    No method raises for faults of the medium (slow, full, gone, corrupt): these are misses or unsaved blocks, counted
    in `stats`. They raise ValueError for a key or a buffer of the wrong size, and RuntimeError after `close`.
    """

    batch_bytes: int = 0
    """Bytes of blocks to request in one call of `lend`, because they share a round trip or a thread switch."""

    waits: bool = True
    """True if a load waits for something other than a processor, so that more threads than processors load more."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns which keys the store holds, without reading blocks; a later load may still miss."""

    @abstractmethod
    def load(self, key: bytes, into: memoryview) -> bool:
        """Fills `into` (writable, of the block's size); True only if the content is verified.

        After False the content of `into` is undefined.
        """

    def lend(self, keys: Sequence[bytes]) -> list[AbstractContextManager[memoryview] | None] | None:
        """Lends verified blocks in the store's own memory, without a copy: one context per key, None for a miss.

        The block may be read inside its context. Every context must be exited, also one that was never entered: a
        `Loan` can be, a generator of `contextlib.contextmanager` cannot. Counts as loads. Returns None instead of a
        list if the store cannot lend.
        """
        return None

    @abstractmethod
    def save(self, key: bytes, block: memoryview) -> bool:
        """Stores a copy of the block; True if the store holds it now, even if it did before."""

    def use(self, keys: Sequence[bytes]) -> None:  # noqa: B027  # a store that orders nothing has nothing to do
        """Counts as a use of the blocks that are there, the last one first, so that the first block of a prompt
        leaves last: without it the others cannot be found.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> int:
        """Removes blocks; returns how many were there."""

    @abstractmethod
    def clear(self) -> int:
        """Removes every block of this store's block size; returns how many were there."""

    @abstractmethod
    def verify(self) -> tuple[int, int]:
        """Reads every block: (intact, corrupt). Corrupt ones are removed."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Returns totals and state."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads and connections; stored blocks stay in media that outlast the process. Idempotent."""


class StoreOptions(Section):
    """Base of every store's options: the keys under `store` in the configuration."""

    ends_with_process: ClassVar[bool] = False
    """True if the blocks are in the memory of the process that opens the store, so no other process sees them."""

    kind: str = Field(description="Name of the store.")

    @property
    def most_bytes(self) -> int | None:
        """The most bytes of blocks, beyond which the store evicts; None if it bounds itself."""
        return None

    @property
    def lasting(self) -> "StoreOptions":
        """Options of the store that outlasts the process: another one if this only adds memory in front of it."""
        return self


class Finding(NamedTuple):
    """A finding of doctor about a store, in addition to the round trip of a block. is_good: False is a warning."""

    name: str
    is_good: bool
    found: str
    expected: str
    advice: str


class ConfiguredStore(KvStore):
    """A store that the configuration names by its `kind`: registered in `STORES` of `store/factory.py`."""

    Options: ClassVar[type[StoreOptions]]
    advice: ClassVar[str] = "see whether the store answers"
    """The advice of doctor if the round trip of a block fails."""

    @classmethod
    @abstractmethod
    def open(cls, options: Any, block_bytes: int, evicts: bool = True) -> KvStore:
        """See `open_store`. options: an object of the class `Options`."""

    @classmethod
    def findings(cls, options: Any) -> Iterator[Finding]:
        """Returns doctor's findings about a store that opens with these options."""
        yield from ()


class Counts:
    """Named totals, thread-safe; the names are fields of `StoreStats`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        """Adds to several totals atomically."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] = self._totals.get(name, 0) + amount

    def stats(self, **state: object) -> StoreStats:
        """Returns the totals together with the store's own state."""
        with self._lock:
            return StoreStats(kind=self._kind, **self._totals, **state)  # type: ignore[arg-type]


HEADER_BYTES = 64
_MAGIC, _VERSION = b"UCMBLOCK", 1
_BEFORE_CRC, _AFTER_CRC = struct.Struct("<8sI"), struct.Struct("<Q32s8x")
_CRC = struct.Struct("<I")


def seal(record: memoryview, key: bytes) -> None:
    """Writes the header over the first 64 bytes of `record`, whose rest is the block."""
    _BEFORE_CRC.pack_into(record, 0, _MAGIC, _VERSION)
    _AFTER_CRC.pack_into(record, _BEFORE_CRC.size + _CRC.size, len(record) - HEADER_BYTES, key)
    _CRC.pack_into(record, _BEFORE_CRC.size, _checksum(record))


def is_intact(record: memoryview, key: bytes) -> bool:
    """True if `record` is a complete, unchanged record of this key."""
    if len(record) < HEADER_BYTES:
        return False
    magic, version = _BEFORE_CRC.unpack_from(record, 0)
    (crc,) = _CRC.unpack_from(record, _BEFORE_CRC.size)
    length, echo = _AFTER_CRC.unpack_from(record, _BEFORE_CRC.size + _CRC.size)
    if (magic, version, length, echo) != (_MAGIC, _VERSION, len(record) - HEADER_BYTES, key):
        return False
    return bool(crc == _checksum(record))


def _checksum(record: memoryview) -> int:
    head = crc32c.crc32c(record[: _BEFORE_CRC.size])
    return int(crc32c.crc32c(record[_BEFORE_CRC.size + _CRC.size :], head))


class Loan:
    """A context for one use of a lent block. block: lent memory. end: called on exit."""

    __slots__ = ("_block", "_end")

    def __init__(self, block: memoryview, end: Callable[[], None]) -> None:
        self._block = block
        self._end = end

    def __enter__(self) -> memoryview:
        return self._block

    def __exit__(self, *exception: object) -> None:
        self._end()


def check_keys(keys: Iterable[bytes]) -> None:
    """Raises ValueError unless every key has 32 bytes."""
    for key in keys:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            found = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise ValueError(f"key: found {found}, expected {KEY_BYTES} bytes")


def check_block_bytes(block_bytes: int, capacity: int | None) -> None:
    """Raises ValueError for an empty block, or one larger than the capacity."""
    if block_bytes < 1:
        raise ValueError(f"block_bytes: found {block_bytes}, expected at least 1")
    if capacity is not None and capacity < block_bytes:
        raise ValueError(f"store.capacity: found {capacity} bytes, expected room for one block of {block_bytes} bytes")


def block_view(name: str, buffer: memoryview, block_bytes: int, *, writable: bool) -> memoryview:
    """The buffer as bytes. Raises ValueError unless it is contiguous, of the block's size and, if asked, writable."""
    view = memoryview(buffer)
    if not view.c_contiguous or view.nbytes != block_bytes or (writable and view.readonly):
        found = f"{view.nbytes} bytes" + (", read-only" if view.readonly else "")
        found += "" if view.c_contiguous else ", not contiguous"
        expected = f"{block_bytes} contiguous{' writable' if writable else ''} bytes"
        raise ValueError(f"{name}: found {found}, expected {expected}")
    return view.cast("B")
