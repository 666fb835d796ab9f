"""The interface of a store: KV blocks by key. A store that fails is one that misses; it never raises into a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal

import msgspec


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the store was opened, and what it holds now. Bytes are those of blocks, without headers.

    capacity: bytes it may hold, None for a server that bounds itself. hits: blocks loaded. misses: keys that a lookup
    or a load did not find, or found corrupt. saves: blocks that were not there before. seconds: of these two.
    corrupt: blocks that failed their check. errors: calls that the medium refused, such as a save on a full disk.
    untouched: blocks that were there, and that the medium did not mark as used (a disk that became read-only).
    breaker: `open` while the store is not asked because it kept failing; `half_open` for the trial after that.
    """

    kind: str
    blocks: int = 0
    bytes: int = 0
    capacity: int | None = None
    hits: int = 0
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

    No method raises for what the medium does (slow, full, gone, corrupt): that is a miss or an unsaved block, counted
    in `stats`. They raise ValueError for a key or a buffer of the wrong size, and RuntimeError after `close`.
    """

    batch_bytes: int = 0
    """Bytes of blocks that a call of `lend` does well to ask for at once, as they share a round trip or a hand-over."""

    waits: bool = True
    """Whether a load waits for something else than a processor: more threads than processors load more, then."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys it holds, as far as it knows without reading blocks; a later load may still miss."""

    @abstractmethod
    def load(self, key: bytes, into: memoryview) -> bool:
        """Fills `into` (writable, of the block's size) and returns True only if its content is verified.

        After False what `into` holds is undefined.
        """

    def lend(self, keys: Sequence[bytes]) -> list[AbstractContextManager[memoryview] | None] | None:
        """Verified blocks where they lie, one entry per key, None for a miss. Counts as loads; no copy is made.

        Each is to be ended, and may be read from its `__enter__` on until then; one that could not be entered is ended,
        too. None instead of a list: this store lends nothing.
        """
        return None

    @abstractmethod
    def save(self, key: bytes, block: memoryview) -> bool:
        """Keeps a copy of the block; True if it is there now, also when it was there before."""

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
        """What happened so far."""

    @abstractmethod
    def close(self) -> None:
        """Ends its threads and connections; blocks that outlast the process stay. A second call does nothing."""
