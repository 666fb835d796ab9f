"""Blocks that wait to be stored: bounded, and patient while the engine runs steps.

A thread that stores a block beside a step on the CPU takes a core from one of the threads that compute, and the others
wait for that one: storing a block of 1.5 MB beside it made a step 3 to 4 ms longer on two cores.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_gaudi_ucm.device.step_activity import StepActivity

POLL_SECONDS = 0.02
"""How often one thread looks whether the engine has become idle. Each look takes about 0.1 ms of a step."""


@dataclass(frozen=True)
class QueuedSave:
    """A block (or a record, which is none), the bytes to store, and when it was queued."""

    key: bytes
    buffer: memoryview
    is_block: bool
    queued: float


class SaveQueue:
    """First in, first out. What is queued is handed out once the engine is idle, and otherwise only

    * after `patience` seconds,
    * while more than half of the capacity is taken, or the step that runs fills more blocks than there is room for, or
    * while someone waits for the end in `flush`.

    Args:
        capacity: most blocks that are queued or being stored.
        patience: seconds; 0: nothing waits.
        activity: of the engine.
        clock: seconds, for `patience`.
    """

    def __init__(
        self,
        capacity: int,
        patience: float,
        activity: StepActivity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._patience = patience
        self._activity = activity
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for threads that store
        self._settled = threading.Condition(self._lock)  # for who waits for the end
        self._waiting: deque[QueuedSave] = deque()
        self._taken = 0
        self._expected = 0
        self._flushing = 0
        self._is_closed = self._has_watcher = False

    @property
    def taken(self) -> int:
        """Blocks that have a place here: reserved, queued, or being stored."""
        return self._taken

    def expect(self, count: int) -> None:
        """The step that begins fills so many blocks."""
        with self._lock:
            self._expected = count
            if self._waiting and self._is_due():
                self._changed.notify()

    def reserve(self, count: int) -> int:
        """Takes places for up to `count` blocks; how many."""
        with self._lock:
            count = min(count, self._capacity - self._taken)
            self._taken += count
            return count

    def put(self, blocks: Sequence[tuple[bytes, memoryview, bool]]) -> None:
        """Blocks with a place: (key, bytes, whether it is a block)."""
        with self._lock:
            now = self._clock()
            self._waiting += [QueuedSave(*block, queued=now) for block in blocks]
            self._expected = 0
            if blocks:
                self._changed.notify()

    def take(self) -> QueuedSave | None:
        """Waits for the next block that is to be stored now; None once the queue is closed and empty."""
        with self._lock:
            while not self._waiting or not self._is_due():
                if not self._waiting and self._is_closed:
                    return None
                self._wait()
            save = self._waiting.popleft()
            if self._waiting:
                self._changed.notify()  # the next one is another thread's, to store or to watch
            return save

    def release(self) -> None:
        """A block that was taken has been stored, or has not."""
        with self._lock:
            self._taken -= 1
            self._settled.notify_all()

    def flush(self, timeout: float) -> bool:
        """Has everything stored, and waits until it is; False after `timeout` seconds."""
        with self._lock:
            self._flushing += 1
            self._changed.notify_all()
            try:
                return self._settled.wait_for(lambda: not self._taken, timeout)
            finally:
                self._flushing -= 1

    def close(self) -> None:
        """Threads end once nothing is queued any more, which nothing waits for from now on."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()

    def check_integrity(self) -> None:
        """Conservation: a place is free or taken, and what is queued has one. Raises RuntimeError."""
        with self._lock:
            if not len(self._waiting) <= self._taken <= self._capacity:
                raise RuntimeError(
                    f"block saver: {self._taken} of {self._capacity} places taken, {len(self._waiting)} blocks queued"
                )

    def _wait(self) -> None:
        """With the lock held. One thread watches the engine and calls the next: no other is woken for nothing."""
        if not self._waiting or self._has_watcher:
            self._changed.wait()
            return
        self._has_watcher = True
        try:
            self._changed.wait(POLL_SECONDS)
        finally:
            self._has_watcher = False

    def _is_due(self) -> bool:
        """Whether the first of the queue is to be stored now, with the lock held."""
        return (
            bool(self._flushing)
            or self._is_closed
            or 2 * self._taken > self._capacity
            or self._capacity - self._taken < self._expected
            or self._clock() - self._waiting[0].queued >= self._patience
            or self._activity.is_idle()
        )
