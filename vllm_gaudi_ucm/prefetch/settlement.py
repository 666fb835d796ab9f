"""How requests of the engine end: with all their blocks, without some, too late, or because nobody wants them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from vllm_gaudi_ucm.prefetch.cache import HostCache
from vllm_gaudi_ucm.prefetch.ledger import Ledger
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.outcome import PrefetchOutcome
from vllm_gaudi_ucm.prefetch.stats import PrefetchCounters
from vllm_gaudi_ucm.prefetch.task import PrefetchTask
from vllm_gaudi_ucm.prefetch.task_queue import TaskQueue


class Settlement:
    """Requests, queue, cache and totals under one lock; `settled` is notified when an outcome stands."""

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
        """Callers that wait for the end of `deliver` calls, on `settled` too."""

    def settle(self, task: PrefetchTask, outcome: PrefetchOutcome) -> bool:
        """Ends a task that is pending, with the lock held; its outcome stands when no `deliver` of it runs."""
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
        """A block has arrived (DONE) or not (LOST), with the lock held; the last one settles the task."""
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
        """The outcome, or TIMEOUT when `timeout` seconds or the task's deadline have passed first."""
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
