"""Warms the rest of the buckets in idle gaps, in a thread that never runs while a step does."""

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_gaudi_ucm.graphs.warm_up.idle_rule import DEFAULT_RULE, IdleRule
from vllm_gaudi_ucm.graphs.warm_up.records import BucketKey
from vllm_gaudi_ucm.graphs.warm_up.warm_up import WarmUp


class IdleWarmUp:
    """A daemon thread that warms one graph at a time between `end_step` and the next `begin_step`.

    State of a thread that a graph's run depends on (inference mode, the current device, a recipe recorder's state) is
    set up by `run_forward` and `run_logits`; only they use global state, because no step runs at that time.
    At the interpreter's exit the thread is stopped and waited for: a thread that is killed in the middle of a
    compilation takes the process down with it.

    Args:
        warm_up: a warm-up whose skeleton is warm.
        rule: how long the device must have been idle.
        finished: called in the thread once no graph is cold.
    """

    def __init__(
        self,
        warm_up: WarmUp,
        rule: IdleRule = DEFAULT_RULE,
        finished: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._warm_up = warm_up
        self._rule = rule
        self._finished = finished
        self._clock = clock
        self._changed = threading.Condition()
        self._in_step = self._warming = self._stopping = self._awaits_end = False
        self._idle_since = clock()
        self._thread: threading.Thread | None = None
        self.waits = 0
        """Steps that waited for a graph; the next attribute is their total waiting time."""
        self.waited_seconds = 0.0

    def start(self) -> None:
        """Starts the thread; the device counts as idle from now on. A running thread is kept."""
        if self.running:
            return
        self._stopping = False
        self._idle_since = self._clock()
        self._thread = threading.Thread(target=self._loop, name="ucm-warm-up", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin_step(self) -> None:
        """Call before a step: no graph starts from now on; waits for the graph that is being warmed, if any.

        A step that is still open (because an error prevented its `end_step`) is continued, never waited for.
        """
        with self._changed:
            self._in_step = True
            if self._warming:
                start = self._clock()
                self._wait_until_nothing_is_warmed()
                self.waits += 1
                self.waited_seconds += self._clock() - start

    def end_step(self) -> None:
        """Call after a step and its sampling: the device is idle from now on."""
        with self._changed:
            self._in_step = False
            self._idle_since = self._clock()
            if self._awaits_end:
                self._awaits_end = False
                self._changed.notify_all()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Calls `begin_step` and `end_step` around a block."""
        self.begin_step()
        try:
            yield
        finally:
            self.end_step()

    def stop(self) -> None:
        """Ends the thread after the graph that is being warmed, and waits for it. May be called again."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        atexit.unregister(self.stop)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _loop(self) -> None:
        while not self._stopping:
            with self._changed:
                is_gap = self._idle_for(0.0)
            if not is_gap:
                continue
            # outside the lock, which steps need, and again after every wait: steps in between change which graph is
            # next
            key = self._warm_up.ready.next_cold()
            if key is None:
                self._finished()
                return
            self._warm_in_gap(key)

    def _warm_in_gap(self, key: BucketKey) -> None:
        with self._changed:
            self._warming = self._idle_for(self._warm_up.last_seconds(key))
            if not self._warming:
                return
        try:
            self._warm_up.warm(key)
        finally:
            with self._changed:
                self._warming = False
                self._changed.notify_all()

    def _idle_for(self, last_seconds: float) -> bool:
        """True if a graph that takes about `last_seconds` may start; if not, returns after waiting for something to
        change.

        Call with the lock held. While steps follow one another, this thread wakes once per `rule.least`, not at every
        step.
        """
        if self._stopping:
            return False
        if self._in_step:
            self._awaits_end = True
            self._changed.wait()
            return False
        seconds = self._rule.seconds_to_wait(last_seconds, self._clock() - self._idle_since)
        if seconds > 0.0:
            self._changed.wait(seconds)
        return seconds == 0.0

    def _wait_until_nothing_is_warmed(self) -> None:
        """Call with the lock held, but not from the warming thread, which would wait for its own end."""
        if self._thread is not threading.current_thread():
            self._changed.wait_for(lambda: not self._warming)
