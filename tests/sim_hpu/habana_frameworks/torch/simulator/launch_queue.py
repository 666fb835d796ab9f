"""What was launched on a stream and has not run yet: the card computes beside the host, as late as it may.

A graph's replay waits here until something that is launched on its stream after it runs, the host reads the card on
that stream, or somebody waits: for the stream, for an event behind it, or for the card. Other streams wait for nothing.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class InFlight(Protocol):
    """Work that has run, of which something may be found only when the host waits."""

    def settle(self) -> None: ...


class LaunchQueue:
    """Of one stream; every thread may launch, run and wait."""

    def __init__(self) -> None:
        self._waiting: deque[Work] = deque()
        self._running = threading.Lock()
        self._ran = 0
        self.launched = 0
        """Works so far: where an event that is recorded now stands."""
        self.in_flight: list[InFlight] = []
        _all.add(self)

    def launch(self, work: Work) -> None:
        """Takes work that is to run later, as it would now: under this thread's inference mode."""
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> None:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                work()

        self._waiting.append(run)
        _busy.add(self)
        self.launched += 1

    def has_run(self, end: int) -> bool:
        """Whether the first `end` works have run."""
        return self._ran >= end

    def wait(self, end: int | None = None) -> None:
        """The host waits for all of it, or the first `end` works: they run, and what is in flight is settled."""
        self.run(end)
        settled, self.in_flight = self.in_flight, []
        for work in settled:
            work.settle()

    def run(self, end: int | None = None) -> None:
        """Runs what waits, all of it or the first `end` works ever launched. Raises what a work raises, once."""
        end = self.launched if end is None else end
        if self._ran >= end:
            return
        with self._running:
            while self._ran < end:
                try:
                    self._waiting.popleft()()
                finally:
                    self._ran += 1
                    if not self._waiting:
                        _busy.discard(self)


_all: weakref.WeakSet[LaunchQueue] = weakref.WeakSet()
# What is launched runs, even if nobody has the stream any more.
_busy: set[LaunchQueue] = set()
default_queue = LaunchQueue()


def run_everything() -> None:
    """The host waits for every stream."""
    for queue in list(_all):
        queue.wait()
