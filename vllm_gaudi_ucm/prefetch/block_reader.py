"""Blocks from the store to where they can be delivered from: lent by it, or copied to host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.prefetch.dispatcher import Dispatcher
from vllm_gaudi_ucm.prefetch.load import Load
from vllm_gaudi_ucm.store.base import KvStore

Allocate = Callable[[int], memoryview]

logger = plugin_logger(__name__)


class BlockReader:
    """Sets `buffer` of loads, outside the dispatcher's lock; whatever the store raises leaves it None."""

    def __init__(self, dispatcher: Dispatcher, store: KvStore, block_bytes: int, allocate: Allocate) -> None:
        self._dispatcher = dispatcher
        self._store = store
        self._block_bytes = block_bytes
        self._allocate = allocate

    def read(self, loads: Sequence[Load], lent: ExitStack) -> None:
        """Reads what is not in host memory already. Loans end with `lent`, also those that could not be entered."""
        wanted = [load for load in loads if not load.cached]
        if not wanted:
            return
        dispatcher, failed, start = self._dispatcher, 0, self._dispatcher.clock()
        try:
            loans = self._store.lend([load.key for load in wanted])
            if loans is None:
                failed = sum(not self._load(load) for load in wanted)
            else:
                given = [(load, loan) for load, loan in zip(wanted, loans, strict=True) if loan is not None]
                for _, loan in given:
                    lent.push(loan)
                for load, loan in given:
                    load.buffer = loan.__enter__()
        except Exception as error:
            failed = sum(load.buffer is None for load in wanted)
            _warn(error)
        with dispatcher.lock:
            found = sum(load.buffer is not None for load in wanted)
            counters = dispatcher.counters
            counters.load_seconds += dispatcher.clock() - start
            counters.errors += failed
            counters.misses += len(wanted) - found - failed
            counters.blocks_loaded += found
            counters.bytes_loaded += found * self._block_bytes
            for load in wanted:
                if load.slot is not None and load.buffer is not None and load.buffer is load.slot.buffer:
                    dispatcher.cache.put(load.slot, load.key)

    def keep(self, load: Load) -> bool:
        """Copies a block that the store has lent to the slot of the cache; False where there is no memory."""
        assert load.buffer is not None
        try:
            np.copyto(np.frombuffer(self._slot_buffer(load), np.uint8), np.frombuffer(load.buffer, np.uint8))
        except Exception as error:
            logger.warning("prefetch: no host memory for a block: %s: %s", type(error).__name__, error)
            return False
        return True

    def _load(self, load: Load) -> bool:
        """For a store that lends nothing; False where it raised."""
        try:
            buffer = self._slot_buffer(load)
            load.buffer = buffer if self._store.load(load.key, buffer) else None
        except Exception as error:
            _warn(error)
            return False
        return True

    def _slot_buffer(self, load: Load) -> memoryview:
        """Host memory for the block: the cache's, where that has room."""
        if load.slot is None:
            with self._dispatcher.lock:
                load.slot = self._dispatcher.cache.take()
        if load.slot is None:
            return self._allocate(self._block_bytes)
        if load.slot.buffer is None:
            load.slot.buffer = self._allocate(self._block_bytes)
        return load.slot.buffer


def _warn(error: Exception) -> None:
    logger.warning("prefetch: a block could not be loaded from the store: %s: %s", type(error).__name__, error)
