"""Threads of the engine that have nothing to do, and how many of them are called for what there is."""

from __future__ import annotations

import os
import queue


class IdleThreads:
    """All but `wait` and `call` are to be called with the dispatcher's lock held.

    Args:
        count: threads of the engine.
        store_waits: whether loads wait for something else than a processor. Where they do not, they take one each, and
            all processors at once for urgent requests alone: the model computes on one while others are prefetched.
    """

    def __init__(self, count: int, store_waits: bool) -> None:
        self._count = count
        self._store_waits = store_waits
        self._cores = len(os.sched_getaffinity(0))
        self._idle = 0
        # In C, unlike a condition: after a step of the model each line of Python comes from memory, not from a cache.
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def join(self) -> None:
        """The calling thread is about to `wait`."""
        self._idle += 1

    def leave(self) -> None:
        """The calling thread has waited."""
        self._idle -= 1

    def wait(self) -> None:
        """Returns after a call, which may have been meant for another thread."""
        self._calls.get()

    def call(self, count: int = 1) -> None:
        """Has so many threads look for work, or for their end."""
        for _ in range(count):
            self._calls.put(None)

    def call_for_work(self, is_urgent: bool, is_any_busy: bool) -> None:
        """Calls a thread unless none is idle, or as many as should work at once are at it: they will come to it.

        is_any_busy: whether blocks are on their way; where threads are missing, those that are not idle are too few.

        One thread calls the next: all at once would be in each other's way.
        """
        is_enough = is_any_busy and not self._store_waits and self._count - self._idle >= self._most(is_urgent)
        if self._idle and not is_enough:
            self.call()

    def share(self, blocks: int, is_urgent: bool) -> int:
        """How many of so many blocks the calling thread should take, so that idle ones have their part."""
        return -(-blocks // min(self._idle + 1, self._most(is_urgent)))

    def _most(self, is_urgent: bool) -> int:
        """Threads that can work at once without being in each other's way."""
        return self._cores if is_urgent or self._store_waits else max(1, self._cores - 1)
