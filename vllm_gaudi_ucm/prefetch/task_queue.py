"""Requests with blocks to load, the most urgent first, ageing included."""

from __future__ import annotations

import heapq
from collections import Counter

from vllm_gaudi_ucm.prefetch.priority import PrefetchPriority
from vllm_gaudi_ucm.prefetch.task import PrefetchTask


class TaskQueue:
    """A heap over `submitted + priority * ageing`, then the sequence number; tasks themselves are never compared.

    A task that waits rises by one priority every `ageing` seconds. All tasks rise at the same speed, so their order
    does not change with time: a rank is computed once. Entries that were moved or removed stay until they are met.
    """

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing
        self._heap: list[tuple[float, int, PrefetchTask]] = []
        self._ranks: dict[int, tuple[float, PrefetchTask]] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, task: PrefetchTask) -> bool:
        return task.sequence in self._ranks

    def put(self, task: PrefetchTask) -> None:
        """Adds a task, or moves it to where its priority has it now."""
        rank = task.submitted + task.priority * self._ageing
        self._ranks[task.sequence] = (rank, task)
        heapq.heappush(self._heap, (rank, task.sequence, task))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, sequence, task) for sequence, (rank, task) in self._ranks.items()]
            heapq.heapify(self._heap)

    def remove(self, task: PrefetchTask) -> None:
        """Nothing where it is not there."""
        self._ranks.pop(task.sequence, None)

    def first(self) -> PrefetchTask | None:
        """The most urgent task, which stays; None without any."""
        while self._heap:
            rank, sequence, task = self._heap[0]
            if self._ranks.get(sequence, (None,))[0] == rank:
                return task
            heapq.heappop(self._heap)
        return None

    def depths(self) -> Counter[PrefetchPriority]:
        """Blocks that wait for a thread, by the priority that their request was given."""
        found: Counter[PrefetchPriority] = Counter()
        for _, task in self._ranks.values():
            found[task.priority] += task.queued
        return found

    def tasks(self) -> list[PrefetchTask]:
        """Every task in the queue, in no order."""
        return [task for _, task in self._ranks.values()]
