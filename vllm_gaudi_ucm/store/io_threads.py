"""A few threads that wait for a slow medium instead of the caller, who waits until a deadline at most."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Result = TypeVar("Result")


class DeadlineExceededError(TimeoutError):
    """Raised if a call had not ended at its deadline. It may still end, but does not touch the caller's buffers."""


class AbandonedError(Exception):
    """Raised in an I/O thread whose caller no longer waits."""


class Job(Generic[Result]):
    """A call for an I/O thread. It touches memory shared with the caller only inside `with job.handover()`."""

    def __init__(self, function: Callable[[Job[Result]], Result]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._abandoned = False
        self._result: Result | None = None
        self._error: BaseException | None = None

    @contextmanager
    def handover(self) -> Iterator[None]:
        """Keeps the caller waiting while its buffers are touched. Code inside must not block.

        Raises AbandonedError if the caller has stopped waiting.
        """
        with self._lock:
            if self._abandoned:
                raise AbandonedError
            yield

    def run(self) -> None:
        """Called by the I/O thread."""
        try:
            self._result = self._function(self)
        except BaseException as error:
            self._error = error
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds`; if the job has not ended by then, abandons it and returns False."""
        if self._ended.wait(seconds):
            return True
        with self._lock:
            self._abandoned = not self._ended.is_set()
        return not self._abandoned

    def result(self) -> Result:
        """Returns the function's result, or raises its exception."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class IoThreads:
    """At most `count` threads, started on demand; further calls wait in a queue, until their deadline at most.

    Daemon threads: one that hangs in the system must not keep the interpreter from ending.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def call(self, function: Callable[[Job[Result]], Result], deadline: float) -> Result:
        """Runs `function(job)` in one of the threads; raises its exception, or `DeadlineExceededError`."""
        job = Job(function)
        self._submit(job)
        if not job.wait(deadline):
            with self._changed:
                if job in self._waiting:
                    self._waiting.remove(job)
            raise DeadlineExceededError(f"no answer within {deadline:g} s")
        return job.result()

    def begin(self, function: Callable[[], None]) -> None:
        """Runs `function` in one of the threads and returns at once; its exception is lost."""
        self._submit(Job(lambda _: function()))

    def close(self, seconds: float) -> bool:
        """Ends the threads, and waits up to `seconds` for their calls; True if all have ended."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _submit(self, job: Job) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._idle <= len(self._waiting) and len(self._threads) < self._count:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                try:
                    thread.start()
                    self._threads.append(thread)
                except RuntimeError:  # the system has no more threads: the existing ones do the work
                    if not self._threads:
                        raise
            self._waiting.append(job)
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._waiting and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            job.run()
