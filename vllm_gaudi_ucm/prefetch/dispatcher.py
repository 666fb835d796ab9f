"""State that the engine's threads and callers share: requests, blocks being loaded, and which block is next."""

import os
import queue
import threading
from collections.abc import Callable, Sequence

from vllm_gaudi_ucm.prefetch.cache import HostCache
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.stats import PrefetchCounters
from vllm_gaudi_ucm.prefetch.tasks import (
    DONE,
    LOST,
    Deliver,
    Ledger,
    Load,
    PrefetchOutcome,
    PrefetchPriority,
    PrefetchTask,
    TaskQueue,
)


class Settlement:
    """Requests, queue, cache and totals under one lock; `settled` is notified when an outcome is final."""

    def __init__(self, options: PrefetchOptions, clock: Callable[[], float]) -> None:
        self.options = options
        self.clock = clock
        self.lock = threading.Lock()
        self.settled = threading.Condition(self.lock)
        self.cache = HostCache(options.prefetch_cache_size)
        self.queue = TaskQueue(options.ageing)
        self.ledger = Ledger(self.cache)
        self.counters = PrefetchCounters()
        self.drains = 0
        """Callers that wait for running `deliver` calls to return; `settled` wakes them, too."""

    def settle(self, task: PrefetchTask, outcome: PrefetchOutcome) -> bool:
        """Ends a pending task, with the lock held; its outcome is final when no `deliver` of it runs."""
        if not task.is_open:
            return False
        self.queue.remove(task)
        task.settle(outcome)
        self.finish_if_quiet(task)
        return True

    def finish_if_quiet(self, task: PrefetchTask) -> None:
        """Makes a settled task's outcome final once no `deliver` of it runs; with the lock held."""
        if task.settling is not None and task.outcome is None and not task.delivering:
            self.ledger.finish(task, task.settling)
            self.settled.notify_all()

    def mark(self, task: PrefetchTask, index: int, state: int) -> None:
        """Marks a block as arrived (DONE) or not (LOST), with the lock held; the last one settles the task."""
        task.mark(index, state)
        if task.is_open and not task.remaining:
            self.settle(task, PrefetchOutcome.FAILED if task.failed() else PrefetchOutcome.READY)

    def expire(self, task: PrefetchTask) -> None:
        """Ends a task whose deadline has passed, with the lock held."""
        if task.is_open and self.clock() >= task.expires:
            self.settle(task, PrefetchOutcome.TIMEOUT)

    def cancel(self, task: PrefetchTask) -> bool:
        with self.lock:
            return self.settle(task, PrefetchOutcome.CANCELLED)

    def outcome_of(self, task: PrefetchTask) -> PrefetchOutcome | None:
        with self.lock:
            self.expire(task)
            return task.outcome

    def failed_of(self, task: PrefetchTask) -> frozenset[int]:
        with self.lock:
            return task.failed()

    def drained(self, request_id: str, timeout: float) -> bool:
        """Waits until no `deliver` of this id runs; False after `timeout` seconds."""
        with self.lock:
            self.drains += 1
            try:
                return self.settled.wait_for(lambda: request_id not in self.ledger.delivering, timeout)
            finally:
                self.drains -= 1

    def wait(self, task: PrefetchTask, timeout: float | None) -> PrefetchOutcome:
        """Waits and returns the outcome, or TIMEOUT if `timeout` seconds or the task's deadline pass first."""
        with self.lock:
            start = self.clock()
            limit = task.expires if timeout is None else min(task.expires, start + timeout)
            self.counters.waits += 1
            while task.outcome is None and (left := limit - self.clock()) > 0:
                self.settled.wait(left)
            self.expire(task)
            self.counters.wait_seconds += self.clock() - start
            self.counters.wait_timeouts += task.outcome in (None, PrefetchOutcome.TIMEOUT)
            return task.outcome or PrefetchOutcome.TIMEOUT


class IdleThreads:
    """Idle threads. Call all methods except `wait` and `call` with the dispatcher's lock held.

    Args:
        count: threads of the engine.
        store_waits: whether loads wait for something other than a processor. If not, each load occupies one, and only
            urgent requests may use all processors: the model computes on one while others are prefetched.
    """

    def __init__(self, count: int, store_waits: bool) -> None:
        self._count = count
        self._store_waits = store_waits
        self._cores = len(os.sched_getaffinity(0))
        self._idle = 0
        # In C, unlike a condition: after a step of the model, each line of Python is fetched from memory, not from a
        # cache.
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def join(self) -> None:
        """Registers the thread; call it before `wait`."""
        self._idle += 1

    def leave(self) -> None:
        """Unregisters the thread; call it after `wait`."""
        self._idle -= 1

    def wait(self) -> None:
        """Returns after a call, which may have been meant for another thread."""
        self._calls.get()

    def call(self, count: int = 1) -> None:
        """Wakes `count` threads, to look for work or to end."""
        for _ in range(count):
            self._calls.put(None)

    def call_for_work(self, is_urgent: bool, is_any_busy: bool) -> None:
        """Wakes a thread unless none is idle, or enough threads are working already, which will get to the work.

        is_any_busy: whether blocks are being loaded. Without it dead threads would count as busy.

        One thread wakes the next: waking all at once would make them contend.
        """
        is_enough = is_any_busy and not self._store_waits and self._count - self._idle >= self._most(is_urgent)
        if self._idle and not is_enough:
            self.call()

    def share(self, blocks: int, is_urgent: bool) -> int:
        """Returns how many of `blocks` the calling thread should take, so that idle threads get their share."""
        return -(-blocks // min(self._idle + 1, self._most(is_urgent)))

    def _most(self, is_urgent: bool) -> int:
        """Returns the most threads that can work at once without slowing each other down."""
        return self._cores if is_urgent or self._store_waits else max(1, self._cores - 1)


class Dispatcher(Settlement):
    """Decides which block a free thread loads next, and what its end means for the requests that wait for it.

    Reads of the store and calls of `deliver` happen outside the lock, in load_runner.py.
    """

    def __init__(
        self, options: PrefetchOptions, clock: Callable[[], float], batch: int = 1, store_waits: bool = True
    ) -> None:
        """Makes the dispatcher. batch: most blocks of a request that a thread takes. store_waits: `KvStore.waits`."""
        super().__init__(options, clock)
        self._batch = batch
        self.idle = IdleThreads(options.prefetch_workers, store_waits)
        self.loads: dict[bytes, Load] = {}
        self.generation = 0
        """Odd while the engine runs; threads of an earlier generation take no more work."""
        self._sequence = 0

    @property
    def is_running(self) -> bool:
        return self.generation % 2 == 1

    def submit(
        self,
        request_id: str,
        keys: Sequence[bytes],
        priority: PrefetchPriority,
        deliver: Deliver | None,
        deadline: float,
    ) -> PrefetchTask:
        """Adds a task, pending or settled at once. An earlier task of the same id is cancelled and forgotten."""
        with self.lock:
            now = self.clock()
            self._sequence += 1
            task = PrefetchTask(
                request_id, keys, priority, deliver, submitted=now, expires=now + deadline, sequence=self._sequence
            )
            previous = self.ledger.find(request_id)
            if previous is not None:
                self.settle(previous, PrefetchOutcome.CANCELLED)
            self.ledger.add(task)
            self.counters.submitted += 1
            if not self.is_running:
                self.settle(task, PrefetchOutcome.CANCELLED)
            elif not keys:
                self.settle(task, PrefetchOutcome.READY)
            elif deliver is None and not self._make_room(task):
                self.counters.shed += 1
                self.settle(task, PrefetchOutcome.FAILED)
            else:
                self._lose_what_cannot_fit(task)
                self.queue.put(task)
                self.idle.call_for_work(_is_urgent(task), bool(self.loads))
            return task

    def next_loads(self, generation: int) -> list[Load]:
        """Waits for and returns a request's next blocks to read or to deliver; none when this generation should end."""
        while True:
            with self.lock:
                if generation != self.generation:
                    self.idle.call()  # the call may have been meant for another thread
                    return []
                loads = self._next_loads()
                if loads:
                    if (following := self.queue.first()) is not None:
                        self.idle.call_for_work(_is_urgent(following), True)
                    return loads
                self.idle.join()
            self.idle.wait()
            with self.lock:
                self.idle.leave()

    def _next_loads(self) -> list[Load]:
        loads: list[Load] = []
        while not loads and (task := self.queue.first()) is not None:
            self.expire(task)
            most = min(self._batch, self.idle.share(task.queued, _is_urgent(task)))
            while task.is_open and task.queued and len(loads) < most:
                index = task.cursor
                task.cursor += 1
                if not task.queued:
                    self.queue.remove(task)
                load = self._dispatch(task, index) if task.states[index] != LOST else None
                if load is not None:
                    loads.append(load)
        return loads

    def _dispatch(self, task: PrefetchTask, index: int) -> Load | None:
        """Returns a load for a thread, or None: the block joined a load, is in the cache, or has no room.

        Only a request that needs the block in the cache takes room there: the store may lend it to the others.
        """
        key = task.keys[index]
        if key in self.loads:
            self.counters.blocks_shared += 1
            self.loads[key].waiters.append((task, index))
            return None
        slot = self.cache.use(key)
        cached = slot is not None
        self.counters.blocks_cached += cached
        if cached and task.deliver is None:
            assert slot is not None
            task.pins.append(slot)
            self.mark(task, index, DONE)
            return None
        if task.deliver is None:
            slot = self.cache.take_slot()
            if slot is None:
                self.counters.no_room += 1
                self.mark(task, index, LOST)
                return None
        load = self.loads[key] = Load(key, slot, cached)
        load.waiters.append((task, index))
        return load

    def _make_room(self, task: PrefetchTask) -> bool:
        """True if one more prefetch may be pending; one of a lower priority may be given up for it.

        Loads with `deliver` do not count: their requests have blocks on the device already, which bounds them.
        """
        others = [other for other in self.ledger.pending() if other.deliver is None and other is not task]
        for other in others:
            self.expire(other)
        others = [other for other in others if other.is_open]
        if len(others) < self.options.max_pending_prefetch:
            return True
        worst = max(others, key=lambda other: (other.priority, other.sequence))
        if worst.priority <= task.priority:
            return False
        self.counters.shed += 1
        return self.settle(worst, PrefetchOutcome.FAILED)

    def _lose_what_cannot_fit(self, task: PrefetchTask) -> None:
        """Gives up blocks of a prefetch larger than the cache, which would evict its own first blocks."""
        if task.deliver is None:
            for index in range(self.cache.capacity, len(task.keys)):
                self.counters.no_room += 1
                self.mark(task, index, LOST)


def _is_urgent(task: PrefetchTask) -> bool:
    return task.priority is PrefetchPriority.URGENT
