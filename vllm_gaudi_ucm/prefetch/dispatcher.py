"""What the engine's threads and its callers share: who gets the next free thread, and blocks on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_gaudi_ucm.prefetch.idle_threads import IdleThreads
from vllm_gaudi_ucm.prefetch.load import Load
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.outcome import PrefetchOutcome
from vllm_gaudi_ucm.prefetch.priority import PrefetchPriority
from vllm_gaudi_ucm.prefetch.settlement import Settlement
from vllm_gaudi_ucm.prefetch.task import DONE, LOST, Deliver, PrefetchTask


class Dispatcher(Settlement):
    """Which block a free thread loads next, and what its end means for the requests that wait for it.

    Reads of the store and calls of `deliver` happen outside the lock, in load_runner.py.
    """

    def __init__(
        self, options: PrefetchOptions, clock: Callable[[], float], batch: int = 1, store_waits: bool = True
    ) -> None:
        """batch: most blocks of a request that a thread takes at once. store_waits: see `KvStore.waits`."""
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
        """A new task, pending or settled at once. An earlier one of the same id is cancelled and forgotten."""
        with self.lock:
            now = self.clock()
            self._sequence += 1
            task = PrefetchTask(request_id, keys, priority, deliver, now, now + deadline, self._sequence)
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
        """The next blocks to read or to deliver, of one request, waited for; none when threads of this generation are
        to end."""
        while True:
            with self.lock:
                if generation != self.generation:
                    self.idle.call()  # what called it here may have been meant for another thread
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
        """A load for a thread, or None: the block joined a load, is in the cache, or has nowhere to go.

        Only who wants to find the block in the cache takes room there: the store may lend it to the others.
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
            slot = self.cache.take()
            if slot is None:
                self.counters.no_room += 1
                self.mark(task, index, LOST)
                return None
        load = self.loads[key] = Load(key, slot, cached)
        load.waiters.append((task, index))
        return load

    def _make_room(self, task: PrefetchTask) -> bool:
        """Whether a prefetch may be pending beside the others, for which one of a lower priority may have to go.

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
        """A prefetch into the cache that is larger than the cache would push its own first blocks out."""
        if task.deliver is None:
            for index in range(self.cache.capacity, len(task.keys)):
                self.counters.no_room += 1
                self.mark(task, index, LOST)


def _is_urgent(task: PrefetchTask) -> bool:
    return task.priority is PrefetchPriority.URGENT
