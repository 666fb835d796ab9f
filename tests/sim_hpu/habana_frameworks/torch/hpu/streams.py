"""`Stream` and `Event` of the card: everything has run when a call returns."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from habana_frameworks.torch.simulator.state import state


class Event:
    """A moment in a stream's work."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self._timing = enable_timing
        self._recorded: float | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        state.cut()
        self._recorded = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def wait(self, stream: "Stream | None" = None) -> None:
        """Nothing is left to wait for."""

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to another. Raises unless both measure time and were recorded."""
        if not (self._timing and end._timing) or self._recorded is None or end._recorded is None:
            raise RuntimeError("elapsed_time: both events must be made with enable_timing=True and recorded")
        return 1e3 * (end._recorded - self._recorded)


class Stream:
    """A queue of work."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        state.cut()

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: "Stream") -> None:
        """Nothing is left to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing is left to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        recorded = Event() if event is None else event
        recorded.record(self)
        return recorded


_current = default = Stream()


def current_stream(device: Any = None) -> Stream:
    return _current


def default_stream(device: Any = None) -> Stream:
    return default


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """Makes a stream the current one for a while."""
    global _current
    before, _current = _current, chosen
    try:
        yield
    finally:
        _current = before
