"""What the engine's threads and its callers share: who gets the next free thread, and blocks on their way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

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

    def __init__(self, options: PrefetchOptions, clock: Callable[[], float]) -> None:
        super().__init__(options, clock)
        self.work = threading.Condition(self.lock)
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
                self.work.notify(len(keys))
            return task

    def next_load(self, generation: int) -> Load | None:
        """The next block to read or to deliver, waited for; None when threads of this generation are to end."""
        with self.lock:
            while generation == self.generation:
                load = self._next_load()
                if load is not None:
                    return load
                self.work.wait()
            return None

    def _next_load(self) -> Load | None:
        while (task := self.queue.first()) is not None:
            self.expire(task)
            if not task.is_open:
                continue
            index = task.cursor
            task.cursor += 1
            if task.cursor == len(task.keys):
                self.queue.remove(task)
            load = self._dispatch(task, index) if task.states[index] != LOST else None
            if load is not None:
                return load
        return None

    def _dispatch(self, task: PrefetchTask, index: int) -> Load | None:
        """A load for a thread, or None: the block joined a load, is in the cache, or has nowhere to go."""
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
        slot = slot or self.cache.take()
        if slot is None and task.deliver is None:
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
