"""Whether the engine runs steps: what can wait does so while it does."""

from __future__ import annotations

import time
from collections.abc import Callable

IDLE_SECONDS = 0.01
"""Without a step, after which the engine counts as idle: between two steps of a request pass about two milliseconds."""


class StepActivity:
    """Told by the thread that runs steps, asked by any other.

    clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_running = False
        self._ended = -IDLE_SECONDS + clock()

    def begin(self) -> None:
        """A step begins."""
        self._is_running = True

    def end(self) -> None:
        """It has ended."""
        self._ended = self._clock()
        self._is_running = False

    def is_idle(self) -> bool:
        """No step runs, and none has just ended."""
        return not self._is_running and self._clock() - self._ended >= IDLE_SECONDS
