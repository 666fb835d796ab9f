"""The work of an engine thread: reads blocks, and delivers each to the requests that wait for it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.prefetch.dispatcher import Dispatcher
from vllm_gaudi_ucm.prefetch.tasks import DONE, LOST, WAITING, Load, PrefetchTask
from vllm_gaudi_ucm.store.base import KvStore

Allocate = Callable[[int], memoryview]

logger = plugin_logger(__name__)


class BlockReader:
    """Sets `buffer` of loads, outside the dispatcher's lock; an exception of the store leaves it None."""

    def __init__(self, dispatcher: Dispatcher, store: KvStore, block_bytes: int, allocate: Allocate) -> None:
        self._dispatcher = dispatcher
        self._store = store
        self._block_bytes = block_bytes
        self._allocate = allocate

    def read(self, loads: Sequence[Load], lent: ExitStack) -> None:
        """Reads blocks that are not in host memory yet. Loans end with `lent`, even if they could not be entered."""
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
                    load.fill(loan.__enter__())
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
        """Copies a block that the store has lent to the slot of the cache; False if there is no memory."""
        assert load.buffer is not None
        try:
            np.copyto(np.frombuffer(self._slot_buffer(load), np.uint8), np.frombuffer(load.buffer, np.uint8))
        except Exception as error:
            logger.warning("prefetch: no host memory for a block: %s: %s", type(error).__name__, error)
            return False
        return True

    def _load(self, load: Load) -> bool:
        """Loads from a store that cannot lend; False if it raised."""
        try:
            buffer = self._slot_buffer(load)
            load.fill(buffer if self._store.load(load.key, buffer) else None)
        except Exception as error:
            _warn(error)
            return False
        return True

    def _slot_buffer(self, load: Load) -> memoryview:
        """Returns host memory for the block: the cache's, if that has room."""
        if load.slot is None:
            with self._dispatcher.lock:
                load.use(self._dispatcher.cache.take_slot())
        if load.slot is None:
            return self._allocate(self._block_bytes)
        return load.slot.memory(self._allocate, self._block_bytes)


def _warn(error: Exception) -> None:
    logger.warning("prefetch: a block could not be loaded from the store: %s: %s", type(error).__name__, error)


Turn = tuple[Load, PrefetchTask, int]
"""A block, and the request and index to deliver it to next."""


class LoadRunner:
    """Runs loads outside the dispatcher's lock; an exception of a store or a `deliver` fails only that block."""

    def __init__(self, dispatcher: Dispatcher, reader: BlockReader) -> None:
        self._dispatcher = dispatcher
        self._reader = reader

    def run_loads(self, loads: Sequence[Load]) -> None:
        """Runs loads, and leaves no trace of them even if the thread ends in the middle.

        The lock is taken once for all of them, before they are delivered: copies of large blocks evict the processor's
        caches, and a call between them would cost several times as much.
        """
        dispatcher = self._dispatcher
        with ExitStack() as lent:
            try:
                self._reader.read(loads, lent)
                with dispatcher.lock:
                    turns = self._next_turns(loads)
                while turns:
                    states = [self._deliver(*turn) for turn in turns]
                    with dispatcher.lock:
                        for (load, task, _), state in zip(turns, states, strict=True):
                            if task.deliver is None:
                                self._kept(load, state)
                            else:
                                self._delivered(load, state)
                        turns = self._next_turns([load for load, _, _ in turns])
            except BaseException:
                self._abandon(loads)
                raise

    def _next_turns(self, loads: Sequence[Load]) -> list[Turn]:
        """Returns the next request of each load, with the lock held; loads without any have ended."""
        turns = ((load, self._next_waiter(load)) for load in loads)
        return [(load, *waiter) for load, waiter in turns if waiter is not None]

    def _next_waiter(self, load: Load) -> tuple[PrefetchTask, int] | None:
        """Returns the next request to deliver the block to, with the lock held, and marks the others on the way. None
        ends the load. A request without `deliver` is returned, and stays the next, if the block must be kept first.
        """
        dispatcher, cache = self._dispatcher, self._dispatcher.cache
        while load.waiters:
            task, index = load.waiters.pop(0)
            if not task.is_open:
                continue
            if load.buffer is None:
                dispatcher.mark(task, index, LOST)
                continue
            if task.deliver is not None:
                task.delivering += 1
                dispatcher.ledger.delivering[task.request_id] += 1
                load.begin_delivery(task, index)
                return task, index
            if load.slot is None:
                load.use(cache.take_slot())
            if load.slot is None:
                dispatcher.counters.no_room += 1
                dispatcher.mark(task, index, LOST)
            elif load.slot.key is None:
                load.waiters.insert(0, (task, index))
                return task, index
            else:
                load.slot.users += 1
                task.pins.append(load.slot)
                dispatcher.mark(task, index, DONE)
        self._end(load)
        return None

    def _kept(self, load: Load, state: int) -> None:
        """Handles, with the lock held, the end of a copy, good or bad, for requests that need the cached block."""
        if state == DONE:
            assert load.slot is not None
            self._dispatcher.cache.put(load.slot, load.key)
        else:
            self._dispatcher.mark(*load.waiters.pop(0), LOST)

    def _deliver(self, load: Load, task: PrefetchTask, index: int) -> int:
        if task.deliver is None:
            return DONE if self._reader.keep(load) else LOST
        if not task.is_open:
            return LOST  # cancelled while those before it were delivered
        try:
            assert load.buffer is not None
            task.deliver(index, load.buffer)
        except Exception as error:
            with self._dispatcher.lock:
                self._dispatcher.counters.deliver_errors += 1
            what = f"{type(error).__name__}: {error}"
            logger.warning("prefetch of request %s: block %d could not be delivered: %s", task.request_id, index, what)
            return LOST
        return DONE

    def _delivered(self, load: Load, state: int) -> None:
        """Handles, with the lock held, the return of a call of `deliver`, if one was made."""
        ended = load.end_delivery()
        if ended is None:
            return
        task, index = ended
        dispatcher = self._dispatcher
        task.delivering -= 1
        dispatcher.mark(task, index, state)
        dispatcher.finish_if_quiet(task)
        if dispatcher.ledger.end_delivery(task.request_id) and dispatcher.drains:
            dispatcher.settled.notify_all()

    def _end(self, load: Load) -> None:
        """Takes the load off the list, with the lock held; a second call does nothing."""
        if self._dispatcher.loads.get(load.key) is load:
            del self._dispatcher.loads[load.key]
            if load.slot is not None:
                self._dispatcher.cache.release(load.slot)

    def _abandon(self, loads: Sequence[Load]) -> None:
        """Abandons loads if the thread ends before them: the requests that still wait do not get the blocks."""
        with self._dispatcher.lock:
            for load in loads:
                self._delivered(load, LOST)
                for task, index in load.waiters:
                    self._dispatcher.mark(task, index, LOST)
                load.waiters.clear()
                self._end(load)


def broken_law(dispatcher: Dispatcher) -> str | None:
    """Returns the first violated conservation law, in words; None if all hold. Called with the lock held."""
    cache, ledger, loads = dispatcher.cache, dispatcher.ledger, dispatcher.loads.values()
    pending = ledger.pending()
    settled = sum(ledger.outcomes.values())
    if dispatcher.counters.submitted != settled + len(pending) + ledger.replaced:
        return f"{dispatcher.counters.submitted} submitted, {settled} settled, {len(pending)} pending"
    if cache.allocated > cache.capacity:
        return f"{cache.allocated} slots allocated of {cache.capacity}"
    filling = sum(load.slot is not None and load.slot.key is None for load in loads)
    if cache.unkeyed != filling:
        return f"{cache.unkeyed} slots are neither free nor found, {filling} are being filled"
    pins = sum(len(task.pins) for task in pending)
    held = sum(len(task.held) for task in ledger.complete())
    delivered = sum(load.slot is not None and load.slot.key is not None for load in loads)
    if cache.keyed_users() != pins + held + delivered:
        return f"{cache.keyed_users()} uses of slots, {pins} pinned, {held} held, {delivered} being delivered"
    delivering = sum(load.delivering is not None for load in loads)
    if delivering != ledger.delivering.total():
        return f"{delivering} blocks being delivered, {ledger.delivering.total()} counted by request"
    for task in dispatcher.queue.tasks():
        if not task.is_open or not task.queued:
            return f"request {task.request_id} is queued without blocks to load"
    for task in pending:
        if task.is_open and task.remaining != task.states.count(WAITING):
            return f"request {task.request_id}: {task.remaining} blocks remain, {task.states.count(WAITING)} wait"
        if not task.is_open and not task.delivering:
            return f"request {task.request_id} is settled, has no `deliver` and no outcome"
    return None
