"""Keeps threads that copy to and from a card apart from one that captures or compiles a graph."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CaptureGate:
    """Copies of several threads run at once, a capture runs alone.

    An operator of another thread would become a part of a graph that is being captured, and compute nothing while the
    card only compiles.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copies = 0
        self._capturing = False

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Waits for the end of a capture."""
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing)
            self._copies += 1
        try:
            yield
        finally:
            with self._changed:
                self._copies -= 1
                self._changed.notify_all()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Waits for copies that have begun and for another capture; later copies wait. Not for a thread that copies."""
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing)
            self._capturing = True
            self._changed.wait_for(lambda: not self._copies)
        try:
            yield
        finally:
            with self._changed:
                self._capturing = False
                self._changed.notify_all()
