"""Tracks whether the engine is running steps: background work waits until it is idle."""

import time
from collections.abc import Callable

IDLE_SECONDS = 0.01
"""After this long without a step, the engine is idle. Two steps of a request are about two milliseconds apart."""


class StepActivity:
    """The thread that runs steps calls `begin` and `end`; any thread may call `is_idle`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_running = False
        self._ended = -IDLE_SECONDS + clock()

    def begin(self) -> None:
        """A step begins."""
        self._is_running = True

    def end(self) -> None:
        """The step has ended."""
        self._ended = self._clock()
        self._is_running = False

    def is_idle(self) -> bool:
        """True if no step runs, and none has just ended."""
        return not self._is_running and self._clock() - self._ended >= IDLE_SECONDS


STEPS = StepActivity()
"""The activity of this process, which drives one device: its worker marks steps, and background work checks it."""
