"""Measures how a worker's start spends its time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StartStages:
    """Seconds of each stage, in the order in which they ended."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Adds the time of the block to a stage, without the time of nested stages."""
        start, before = self._clock(), sum(self.seconds.values())
        yield
        within = sum(self.seconds.values()) - before
        self.add(name, self._clock() - start - within)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def line(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
