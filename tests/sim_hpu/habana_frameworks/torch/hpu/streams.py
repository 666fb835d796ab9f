"""`Stream` and `Event` of the card. Graphs run later (see `LaunchQueue`), all else when it is called."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from habana_frameworks.torch.simulator.launch_queue import LaunchQueue, default_queue
from habana_frameworks.torch.simulator.state import state


class Event:
    """A moment in a stream's work. One that was never recorded is waited for by nobody."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self._timing = enable_timing
        self._recorded: float | None = None
        self._queue, self._end = default_queue, 0

    def record(self, stream: "Stream | None" = None) -> None:
        state.cut()
        self._queue = state.queue if stream is None else stream.queue
        self._end = self._queue.launched
        self._recorded = time.perf_counter()

    def query(self) -> bool:
        """Whether it has happened; to whoever asks again it will have."""
        has_run = self._queue.has_run(self._end)
        self.synchronize()
        return has_run

    def synchronize(self) -> None:
        """The host waits."""
        self._queue.wait(self._end)

    def wait(self, stream: "Stream | None" = None) -> None:
        """A stream waits. What is launched there runs no earlier than now, so this is the time."""
        self._queue.run(self._end)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to another. Raises unless both measure time and were recorded."""
        if not (self._timing and end._timing) or self._recorded is None or end._recorded is None:
            raise RuntimeError("elapsed_time: both events must be made with enable_timing=True and recorded")
        return 1e3 * (end._recorded - self._recorded)


class Stream:
    """A queue of work."""

    def __init__(self, device: Any = None, priority: int = 0, queue: LaunchQueue | None = None, **options: Any) -> None:
        self.priority = priority
        self.queue = LaunchQueue() if queue is None else queue

    def synchronize(self) -> None:
        state.cut()
        self.queue.wait()

    def query(self) -> bool:
        return self.record_event().query()

    def wait_stream(self, stream: "Stream") -> None:
        stream.record_event().wait(self)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        recorded = Event() if event is None else event
        recorded.record(self)
        return recorded


default = Stream(queue=default_queue)


class _Current(threading.local):
    """Of one thread."""

    stream = default


_current = _Current()


def current_stream(device: Any = None) -> Stream:
    return _current.stream


def default_stream(device: Any = None) -> Stream:
    return default


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """Makes a stream this thread's current one for a while."""
    before, queue = _current.stream, state.queue
    _current.stream, state.queue = chosen, chosen.queue
    try:
        yield
    finally:
        _current.stream, state.queue = before, queue
