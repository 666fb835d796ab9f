"""An error at every call that the engine makes of a store and of its callers: nothing stays taken."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.prefetch.stores import BLOCK_BYTES, content, eventually, key, keys
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine, host_memory
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome
from vllm_gaudi_ucm.store.memory import MemoryStore

BLOCKS = 4
NEW = 100


class Faults:
    """Raises at one call of one name, counted from 0. An exit that fails has given its block back, as others have."""

    def __init__(self, name: str, at: int, error: type[BaseException]) -> None:
        self._name, self._at, self._error = name, at, error
        self.calls = 0

    def call(self, name: str) -> None:
        if name == self._name:
            self.calls += 1
            if self.calls - 1 == self._at:
                raise self._error("injected")


class FaultyLoan:
    def __init__(self, loan: AbstractContextManager[memoryview], faults: Faults) -> None:
        self._loan = loan
        self._faults = faults

    def __enter__(self) -> memoryview:
        self._faults.call("enter")
        return self._loan.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._loan.__exit__(*exception)
        self._faults.call("exit")


class FaultyMemoryStore(MemoryStore):
    """A real store, whose calls and loans may fail, or that lends nothing."""

    def __init__(self, faults: Faults, lends: bool) -> None:
        super().__init__(BLOCK_BYTES, BLOCKS * BLOCK_BYTES)
        self.batch_bytes = 3 * BLOCK_BYTES
        self._faults = faults
        self._lends = lends
        for number in range(BLOCKS):
            assert self.save(key(number), memoryview(content(key(number))))

    def lend(self, keys: Sequence[bytes]) -> list[AbstractContextManager[memoryview] | None]:
        if not self._lends:
            return None  # type: ignore[return-value]
        self._faults.call("lend")
        return [None if loan is None else FaultyLoan(loan, self._faults) for loan in super().lend(keys)]  # type: ignore[misc]

    def load(self, key: bytes, into: memoryview) -> bool:
        self._faults.call("load")
        (loan,) = super().lend([key])
        if loan is None:
            return False
        with loan as block:
            into[:] = block
        return True


@pytest.mark.parametrize("error", [OSError, SystemExit])
@pytest.mark.parametrize("delivers", [False, True])
@pytest.mark.parametrize("name", ["lend", "enter", "exit", "allocate", "deliver", "load", "load, allocate"])
def test_an_error_at_every_call(name: str, delivers: bool, error: type[BaseException]) -> None:
    """covers: F7. Whatever fails, also where it ends the thread: every block of the store can be evicted, every slot
    of the cache be filled, every prefetch ends, and the engine goes on."""
    for at in range(BLOCKS + 1):
        faults = Faults(name.rpartition(" ")[2], at, error)
        store = FaultyMemoryStore(faults, lends=not name.startswith("load"))

        def allocate(size: int, faults: Faults = faults) -> memoryview:
            faults.call("allocate")
            return host_memory(size)

        options = PrefetchOptions(prefetch_workers=2, prefetch_cache_size=BLOCKS, deadline=30.0)
        engine = PrefetchEngine(store, BLOCK_BYTES, options, allocate=allocate)
        engine.start()

        def deliver(index: int, block: memoryview, faults: Faults = faults) -> None:
            faults.call("deliver")

        handle = engine.submit_prefetch("a", keys(*range(BLOCKS)), deliver=deliver if delivers else None)
        assert handle.wait(60) in (PrefetchOutcome.READY, PrefetchOutcome.FAILED)
        check_that_nothing_is_taken(engine, store)
        assert engine.stop(10)
        assert engine.stats().cache_bytes == 0


def check_that_nothing_is_taken(engine: PrefetchEngine, store: MemoryStore) -> None:
    engine.forget("a")
    assert eventually(lambda: all(entry.readers == 0 for entry in store._entries.values()))
    engine.check_integrity()
    store.check_integrity()
    for number in range(NEW, NEW + BLOCKS):
        assert store.save(key(number), memoryview(content(key(number))))
    assert store.lookup(keys(*range(BLOCKS))) == [False] * BLOCKS
    handle = engine.submit_prefetch("b", keys(*range(NEW, NEW + BLOCKS)))
    end = handle.wait(60)
    if end is not PrefetchOutcome.READY:  # the fault came in this round
        end = engine.submit_prefetch("b", keys(*range(NEW, NEW + BLOCKS))).wait(60)
    assert end is PrefetchOutcome.READY
    found = engine.get_prefetched_kv("b")
    assert found is not None
    assert [bytes(block) for block in found] == [content(key(number)) for number in range(NEW, NEW + BLOCKS)]
    engine.forget("b")
    engine.check_integrity()
