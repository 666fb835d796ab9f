"""What a thread of the engine does with one block: read it, and deliver it to those who wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.prefetch.dispatcher import Dispatcher
from vllm_gaudi_ucm.prefetch.load import Load
from vllm_gaudi_ucm.prefetch.task import DONE, LOST, PrefetchTask
from vllm_gaudi_ucm.store.base import KvStore

Allocate = Callable[[int], memoryview]

logger = plugin_logger(__name__)


class LoadRunner:
    """Runs loads outside the dispatcher's lock; whatever a store or a `deliver` raises fails that block only."""

    def __init__(self, dispatcher: Dispatcher, store: KvStore, block_bytes: int, allocate: Allocate) -> None:
        self._dispatcher = dispatcher
        self._store = store
        self._block_bytes = block_bytes
        self._allocate = allocate

    def run(self, load: Load) -> None:
        """Leaves no trace of the load behind, even where the thread is ended in the middle of it."""
        try:
            with ExitStack() as lent:
                buffer = self._read(load, lent)
                while (waiter := self._next_waiter(load, buffer)) is not None:
                    if waiter[0].deliver is None:
                        self._keep(load, waiter, buffer)
                    else:
                        self._deliver(load, waiter, buffer)
        finally:
            self._abandon(load)

    def _read(self, load: Load, lent: ExitStack) -> memoryview | None:
        """The block's bytes, where the store lends them or copied to host memory; None where it does not give them."""
        if load.cached and load.slot is not None:
            return load.slot.buffer
        dispatcher, found, failed, start = self._dispatcher, False, False, self._dispatcher.clock()
        buffer = None
        try:
            loan = self._store.lend(load.key)
            if loan is not None:
                buffer, found = lent.enter_context(loan), True
            else:
                buffer = self._buffer(load)
                found = self._store.load(load.key, buffer)
        except Exception as error:
            failed = True
            logger.warning("prefetch: a block could not be loaded from the store: %s: %s", type(error).__name__, error)
        with dispatcher.lock:
            counters = dispatcher.counters
            counters.load_seconds += dispatcher.clock() - start
            counters.errors += failed
            counters.misses += not (found or failed)
            if not found:
                return None
            counters.blocks_loaded += 1
            counters.bytes_loaded += self._block_bytes
            if load.slot is not None and buffer is load.slot.buffer:
                dispatcher.cache.put(load.slot, load.key)
            return buffer

    def _buffer(self, load: Load) -> memoryview:
        """Host memory for the block: the cache's, where that has room."""
        if load.slot is None:
            return self._allocate(self._block_bytes)
        if load.slot.buffer is None:
            load.slot.buffer = self._allocate(self._block_bytes)
        return load.slot.buffer

    def _keep(self, load: Load, waiter: tuple[PrefetchTask, int], buffer: memoryview | None) -> None:
        """A block that the store has lent goes into the cache, for those who want to find it there."""
        assert buffer is not None
        assert load.slot is not None
        is_kept = False
        try:
            self._buffer(load)[:] = buffer
            is_kept = True
        except Exception as error:
            logger.warning("prefetch: no host memory for a block: %s: %s", type(error).__name__, error)
        with self._dispatcher.lock:
            if is_kept:
                self._dispatcher.cache.put(load.slot, load.key)
            else:
                load.waiters.popleft()
                self._dispatcher.mark(*waiter, LOST)

    def _next_waiter(self, load: Load, buffer: memoryview | None) -> tuple[PrefetchTask, int] | None:
        """The next request to deliver the block to; the others are marked on the way. None ends the load.

        One without `deliver` is given, and stays the next, where the block must be kept first.
        """
        dispatcher = self._dispatcher
        with dispatcher.lock:
            while load.waiters:
                task, index = load.waiters.popleft()
                if not task.is_open:
                    continue
                if buffer is None:
                    dispatcher.mark(task, index, LOST)
                elif task.deliver is not None:
                    task.delivering += 1
                    dispatcher.ledger.delivering[task.request_id] += 1
                    load.delivering = task, index
                    return load.delivering
                elif load.slot is None:
                    dispatcher.counters.no_room += 1
                    dispatcher.mark(task, index, LOST)
                elif load.slot.key is None:
                    load.waiters.appendleft((task, index))
                    return task, index
                else:
                    load.slot.users += 1
                    task.pins.append(load.slot)
                    dispatcher.mark(task, index, DONE)
            self._end(load)
            return None

    def _deliver(self, load: Load, waiter: tuple[PrefetchTask, int], buffer: memoryview | None) -> None:
        task, index = waiter
        state = LOST
        try:
            assert task.deliver is not None
            assert buffer is not None
            task.deliver(index, buffer)
            state = DONE
        except Exception as error:
            with self._dispatcher.lock:
                self._dispatcher.counters.deliver_errors += 1
            logger.warning(
                "prefetch of request %s: block %d could not be delivered: %s: %s",
                task.request_id,
                index,
                type(error).__name__,
                error,
            )
        finally:
            with self._dispatcher.lock:
                self._delivered(load, state)

    def _delivered(self, load: Load, state: int) -> None:
        if load.delivering is None:
            return
        task, index = load.delivering
        load.delivering = None
        ledger = self._dispatcher.ledger
        task.delivering -= 1
        ledger.delivering[task.request_id] -= 1
        if not ledger.delivering[task.request_id]:
            del ledger.delivering[task.request_id]
        self._dispatcher.mark(task, index, state)
        self._dispatcher.finish_if_quiet(task)
        self._dispatcher.settled.notify_all()

    def _end(self, load: Load) -> None:
        """Takes the load off the list, with the lock held; a second call does nothing."""
        if self._dispatcher.loads.get(load.key) is load:
            del self._dispatcher.loads[load.key]
            if load.slot is not None:
                self._dispatcher.cache.release(load.slot)

    def _abandon(self, load: Load) -> None:
        """Where the thread was ended before the load was: those who still wait do not get the block."""
        with self._dispatcher.lock:
            self._delivered(load, LOST)
            for task, index in load.waiters:
                self._dispatcher.mark(task, index, LOST)
            load.waiters.clear()
            self._end(load)
