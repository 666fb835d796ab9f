"""Calls to a medium that may fail, hang, or be gone: each ends within its deadline, and none raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.store.breaker import Breaker, BreakerState
from vllm_gaudi_ucm.store.counts import Counts
from vllm_gaudi_ucm.store.io_threads import DeadlineExceededError, IoThreads, Job
from vllm_gaudi_ucm.store.medium import FullError, Medium, RefusedError
from vllm_gaudi_ucm.store.options import FileStoreOptions, RedisStoreOptions

logger = plugin_logger(__name__)
Result = TypeVar("Result")


class CallGuard:
    """A circuit breaker before a few I/O threads. Failures and time-outs are counted in `counts` and logged once."""

    def __init__(
        self,
        medium: Medium,
        options: FileStoreOptions | RedisStoreOptions,
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._medium = medium
        self._deadline = options.deadline
        self._counts = counts
        self._breaker = Breaker(options.breaker.failures, options.breaker.seconds, clock)
        self._threads = IoThreads(f"ucm-store-{medium.kind}", options.io_threads)
        self._closed = False
        self._said: set[type[RefusedError]] = set()

    @property
    def state(self) -> BreakerState:
        """Of the circuit breaker."""
        return self._breaker.state

    def call(self, function: Callable[[Job[Result]], Result], deadline: float | None = None) -> Result | None:
        """What `function(job)` returns in an I/O thread; None if it failed, took too long, or was not let through.

        Raises RuntimeError after `close`.
        """
        self.check_open()
        if not self._breaker.allow():
            return None
        try:
            result = self._threads.call(function, self._deadline if deadline is None else deadline)
        except DeadlineExceededError as error:
            self._counts.add(timeouts=1)
            self._failed(error)
            return None
        except RefusedError as error:
            self._counts.add(errors=1)
            self._breaker.succeeded()  # it answers: what it holds can still be loaded
            self._say_once(error)
            return None
        except Exception as error:
            self._failed(error)
            self.check_open()  # closed by another thread meanwhile
            self._counts.add(errors=1)
            return None
        except BaseException:
            self._breaker.failed()  # interrupted; without this a trial call would never be decided
            raise
        self._breaker.succeeded()
        return result

    def call_unhurried(self, function: Callable[[], Result]) -> Result | None:
        """As `call`, in the caller's thread and without a deadline: for what takes as long as there are blocks."""
        self.check_open()
        try:
            return function()
        except self._medium.errors as error:
            self._counts.add(errors=1)
            logger.warning("%s: %s: %s", self._medium.place(), type(error).__name__, error)
            return None

    def begin(self, function: Callable[[], None]) -> None:
        """Runs `function` in an I/O thread and returns at once; what it raises is lost. Nothing after `close`."""
        if not self._closed:
            try:
                self._threads.begin(function)
            except RuntimeError:
                logger.debug("%s was closed meanwhile", self._medium.place())

    def check_open(self) -> None:
        """Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError(f"the {self._medium.kind} store is closed")

    def close(self) -> bool:
        """Ends the threads, within the deadline; False if this was done before."""
        if self._closed:
            return False
        self._closed = True
        if not self._threads.close(self._deadline):
            logger.warning("%s does not answer: its threads are left to end by themselves", self._medium.place())
        return True

    def _say_once(self, error: RefusedError) -> None:
        if type(error) not in self._said:
            self._said.add(type(error))
            what = "takes no more blocks" if isinstance(error, FullError) else "does not take a block"
            logger.warning("%s %s, which is said once: %s", self._medium.place(), what, error)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, (*self._medium.errors, DeadlineExceededError)):
            logger.error("%s: an error of ours", self._medium.place(), exc_info=error)
        if self._breaker.failed():
            what = f"{type(error).__name__}: {error}"
            logger.warning("%s keeps failing and is left alone for a while: %s", self._medium.place(), what)
