"""The store `tiered`: memory in front of a slower store. Blocks are written to both, and loaded blocks come nearer.

If the slower store does not take a block, the front keeps it and it is written later, as long as the front has it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import msgspec
from pydantic import Field, SerializeAsAny, field_validator

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.options.errors import WORDS, Problem, UcmConfigError
from vllm_gaudi_ucm.store.base import (
    ConfiguredStore,
    Finding,
    KvStore,
    Loan,
    StoreOptions,
    StoreStats,
    block_view,
    check_keys,
)
from vllm_gaudi_ucm.store.factory import open_store, resolve_store_options, store_class
from vllm_gaudi_ucm.store.guarded import GuardedStore
from vllm_gaudi_ucm.store.memory import MemoryStore, MemoryStoreOptions, SharedMemoryStore

logger = plugin_logger(__name__)
_LATER_AT_ONCE = 4
_BEHIND: dict[str, Any] = {WORDS: "a file or Redis store (docs/guides/stores.md)"}


class TieredStoreOptions(StoreOptions):
    """Blocks in host memory in front of a store that outlasts the process."""

    kind: Literal["tiered"] = Field(default="tiered", description="Memory in front of another store.")
    front: MemoryStoreOptions = Field(
        default=MemoryStoreOptions(), description="Memory of each engine's process: the blocks that it used last."
    )
    behind: SerializeAsAny[StoreOptions] = Field(
        description="The store behind it, which has every block.", json_schema_extra=_BEHIND
    )

    @field_validator("behind", mode="before")
    @classmethod
    def _behind_by_kind(cls, value: Any) -> Any:
        options = resolve_store_options(value, "store.behind")
        if options.ends_with_process or isinstance(options, TieredStoreOptions):
            expected = "a store that outlasts the process, such as file or redis"
            raise UcmConfigError([Problem("store.behind.kind", repr(options.kind), expected)])
        return options

    @property
    def lasting(self) -> StoreOptions:
        return self.behind

    @property
    def most_bytes(self) -> int | None:
        return self.behind.most_bytes


class TieredStore(ConfiguredStore):
    """Blocks of `front` and `behind`, two stores of the same block size. Closes both.

    evicts: as for `open_store`; if not, a block counts as saved only if it is behind.
    """

    Options = TieredStoreOptions
    advice = "see whether the store in store.behind answers, and lower store.front.capacity if memory is short"

    def __init__(
        self, front: MemoryStore | SharedMemoryStore, behind: KvStore, block_bytes: int, evicts: bool = True
    ) -> None:
        self._front = front
        self._behind = behind
        self._block_bytes = block_bytes
        self._evicts = evicts
        self.batch_bytes = max(front.batch_bytes, behind.batch_bytes)
        self._lock = threading.Lock()  # for all below; never held while a store works
        self._later: OrderedDict[bytes, None] = OrderedDict()  # blocks in front that are not behind yet
        self._said = False

    @classmethod
    def open(cls, options: TieredStoreOptions, block_bytes: int, evicts: bool = True) -> TieredStore:
        # the front may always evict: what counts as saved without eviction is behind
        front = SharedMemoryStore(options.front, block_bytes)
        try:
            return cls(front, open_store(options.behind, block_bytes, evicts), block_bytes, evicts)
        except BaseException:
            front.close()
            raise

    @classmethod
    def findings(cls, options: TieredStoreOptions) -> Iterator[Finding]:
        yield from store_class(options.behind.kind).findings(options.behind)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        found = self._front.lookup(keys)
        missing = [key for key, is_there in zip(keys, found, strict=True) if not is_there]
        if not missing:
            return found
        behind = iter(self._behind.lookup(missing))
        return [is_there or next(behind) for is_there in found]

    def load(self, key: bytes, into: memoryview) -> bool:
        if self._front.load(key, into):
            return True
        if not self._behind.load(key, into):
            return False
        self._front.save(key, into)
        return True

    def lend(self, keys: Sequence[bytes]) -> list[AbstractContextManager[memoryview] | None]:
        loans = self._front.lend(keys)
        missing = [key for key, loan in zip(keys, loans, strict=True) if loan is None]
        if not missing:
            return loans
        try:
            behind = iter(self._lend_behind(missing))
        except BaseException:
            for loan in loans:
                if loan is not None:
                    loan.__exit__(None, None, None)
            raise
        return [next(behind) if loan is None else loan for loan in loans]

    def _lend_behind(self, keys: Sequence[bytes]) -> list[AbstractContextManager[memoryview] | None]:
        """Lends blocks of the slower store, each of which comes to the front when it is read."""
        lent = self._behind.lend(keys)
        if lent is not None:
            return [
                None if loan is None else _Promotion(self._front, key, loan)
                for key, loan in zip(keys, lent, strict=True)
            ]
        found: list[AbstractContextManager[memoryview] | None] = []
        for key in keys:
            block = memoryview(bytearray(self._block_bytes))
            found.append(Loan(block.toreadonly(), lambda: None) if self.load(key, block) else None)
        return found

    def save(self, key: bytes, block: memoryview) -> bool:
        check_keys([key])
        view = block_view("block", block, self._block_bytes, writable=False)
        (was_in_front,) = self._front.lookup([key])  # then it is behind, or noted already
        is_behind = self._behind.save(key, view)
        is_in_front = self._front.save(key, view)
        if is_behind:
            with self._lock:
                self._later.pop(key, None)
            self._write_later_ones(_LATER_AT_ONCE)
        elif is_in_front and not was_in_front and self._evicts:
            self._note_for_later(key)
        return is_behind or (is_in_front and self._evicts)

    def use(self, keys: Sequence[bytes]) -> None:
        self._front.use(keys)
        self._behind.use(keys)

    def _note_for_later(self, key: bytes) -> None:
        most = max(1, self._front.stats().blocks)
        with self._lock:
            self._later[key] = None
            while len(self._later) > most:
                self._later.popitem(last=False)  # the front has evicted it, or a newer one
            is_first, self._said = not self._said, True
        if is_first:
            what = "did not take a block, which stays in memory in front of it and is written later (logged once)"
            logger.warning("tiered store: the %s store behind %s", self._behind.stats().kind, what)

    def _write_later_ones(self, most: int | None = None) -> None:
        """Writes blocks that the slower store did not take before, the oldest first, until it refuses one."""
        written = 0
        while most is None or written < most:
            with self._lock:
                if not self._later:
                    return
                key, _ = self._later.popitem(last=False)
            (loan,) = self._front.lend([key])
            if loan is None:  # evicted: it is lost, and will be a miss
                continue
            with loan as block:
                if not self._behind.save(key, block):
                    with self._lock:
                        self._later[key] = None
                    return
            written += 1

    def delete(self, keys: Sequence[bytes]) -> int:
        check_keys(keys)
        with self._lock:
            only_in_front = [key for key in keys if self._later.pop(key, False) is None]
        others = [key for key in keys if key not in only_in_front]
        removed = self._front.delete(only_in_front) + self._behind.delete(others)
        self._front.delete(others)
        self._behind.delete(only_in_front)  # another engine may have written them
        return removed

    def clear(self) -> int:
        with self._lock:
            only_in_front = list(self._later)
            self._later.clear()
        removed = self._front.delete(only_in_front)
        self._front.clear()
        return removed + self._behind.clear()

    def verify(self) -> tuple[int, int]:
        """Reads the blocks behind; those in memory cannot change."""
        intact, corrupt = self._behind.verify()
        return intact + self._waiting(), corrupt

    def stats(self) -> StoreStats:
        """Returns the slower store's state, with the hits of both. Blocks count once; the front's copies do not."""
        front, behind, waiting = self._front.stats(), self._behind.stats(), self._waiting()
        return msgspec.structs.replace(
            behind,
            kind="tiered",
            blocks=behind.blocks + waiting,
            bytes=behind.bytes + waiting * self._block_bytes,
            hits=front.hits + behind.hits,
            front_hits=front.hits,
            errors=front.errors + behind.errors,
            bytes_loaded=front.bytes_loaded + behind.bytes_loaded,
            load_seconds=front.load_seconds + behind.load_seconds,
        )

    def _waiting(self) -> int:
        """Returns how many blocks are in front only."""
        with self._lock:
            later = list(self._later)
        return sum(self._front.lookup(later)) if later else 0

    def check_integrity(self) -> None:
        """Raises AssertionError if the counts of a store are inconsistent."""
        self._front.check_integrity()
        if isinstance(self._behind, GuardedStore):
            self._behind.check_integrity()

    def close(self) -> None:
        try:
            self._write_later_ones()
        except RuntimeError:  # closed before
            return
        self._behind.close()
        self._front.close()


class _Promotion:
    """A context for one use of a block of the slower store: entering it saves the block in front."""

    def __init__(self, front: KvStore, key: bytes, loan: AbstractContextManager[memoryview]) -> None:
        self._front = front
        self._key = key
        self._loan = loan

    def __enter__(self) -> memoryview:
        block = self._loan.__enter__()
        self._front.save(self._key, block)
        return block

    def __exit__(self, *exception: Any) -> None:
        self._loan.__exit__(*exception)
