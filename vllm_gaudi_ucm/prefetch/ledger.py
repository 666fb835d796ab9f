"""Requests of the engine by id: pending ones, and the outcomes of the last ones that are complete."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from vllm_gaudi_ucm.prefetch.cache import HostCache
from vllm_gaudi_ucm.prefetch.outcome import PrefetchOutcome
from vllm_gaudi_ucm.prefetch.task import PrefetchTask

KEPT_OUTCOMES = 1024


class Ledger:
    """Not thread-safe: the dispatcher's lock is held around every call.

    An id stands for its newest task. Tasks that were replaced, and whose `deliver` still runs, are counted in
    `delivering` until it has returned.
    """

    def __init__(self, cache: HostCache) -> None:
        self._cache = cache
        self._pending: dict[str, PrefetchTask] = {}
        self._complete: OrderedDict[str, PrefetchTask] = OrderedDict()
        self.delivering: Counter[str] = Counter()
        self.outcomes: Counter[PrefetchOutcome] = Counter()
        self.replaced = 0

    def __len__(self) -> int:
        return len(self._pending)

    def find(self, request_id: str) -> PrefetchTask | None:
        return self._pending.get(request_id) or self._complete.get(request_id)

    def pending(self) -> list[PrefetchTask]:
        return list(self._pending.values())

    def complete(self) -> Iterator[PrefetchTask]:
        return iter(self._complete.values())

    def add(self, task: PrefetchTask) -> None:
        """A new task under an id that is free, or stands for a task that is settled."""
        if self._pending.pop(task.request_id, None) is not None:
            self.replaced += 1
        self.forget(task.request_id)
        self._pending[task.request_id] = task

    def finish(self, task: PrefetchTask, outcome: PrefetchOutcome) -> None:
        """The task's outcome stands; the oldest outcomes are forgotten, unless a caller uses their memory."""
        task.outcome = outcome
        self.outcomes[outcome] += 1
        self.drop_pins(task)
        if self._pending.get(task.request_id) is task:
            del self._pending[task.request_id]
            if not task.forgotten:
                self._complete[task.request_id] = task
        elif self.replaced:
            self.replaced -= 1
        while len(self._complete) > KEPT_OUTCOMES:
            oldest = next((name for name, kept in self._complete.items() if not kept.held), None)
            if oldest is None:
                break
            del self._complete[oldest]

    def end_delivery(self, request_id: str) -> bool:
        """One `deliver` of the id has returned; whether none runs any more."""
        self.delivering[request_id] -= 1
        if self.delivering[request_id]:
            return False
        del self.delivering[request_id]
        return True

    def forget(self, request_id: str) -> None:
        """Drops the outcome; memory that was given to a caller may be used for other blocks from now on."""
        task = self._complete.pop(request_id, None)
        if task is not None:
            for slot in task.held:
                self._cache.release(slot)
            task.held.clear()

    def drop_pins(self, task: PrefetchTask) -> None:
        for slot in task.pins:
            self._cache.release(slot)
        task.pins.clear()
