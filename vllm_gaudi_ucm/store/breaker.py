"""A circuit breaker: what kept failing is left alone for a while, then tried by one call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """Closed: calls go through. Open: none does. Half open: one does, and decides. Safe between threads."""

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = failures
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._opened: float | None = None
        self._trying = False

    @property
    def state(self) -> BreakerState:
        """`half_open` from the moment that a call may try again until it has decided."""
        with self._lock:
            return self._state()

    def allow(self) -> bool:
        """Whether a call may go through; after True exactly one of `succeeded`, `failed` must follow."""
        with self._lock:
            state = self._state()
            if state == "half_open" and not self._trying:
                self._trying = True
                return True
            return state == "closed"

    def succeeded(self) -> None:
        """The call was answered."""
        with self._lock:
            # an answer to a call from before it opened says nothing about now, but does no harm either
            self._failures, self._opened, self._trying = 0, None, False

    def failed(self) -> bool:
        """The call failed, or took too long. True if this opened the breaker."""
        with self._lock:
            was_closed = self._opened is None
            self._failures += 1
            if self._failures < self._most:
                return False
            self._opened, self._trying = self._clock(), False
            return was_closed

    def _state(self) -> BreakerState:
        if self._opened is None:
            return "closed"
        return "half_open" if self._trying or self._clock() - self._opened >= self._seconds else "open"
