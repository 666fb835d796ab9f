"""Ends the threads of engines that nobody stopped: dropped by their owner, or alive when the interpreter ends."""

from __future__ import annotations

import atexit
import threading
import weakref

from vllm_gaudi_ucm.prefetch.threads import EngineThreads

SECONDS = 1.0

_running: weakref.WeakSet[EngineThreads] = weakref.WeakSet()


def end_with(owner: object, threads: EngineThreads) -> None:
    """The threads are stopped once nothing refers to `owner` any more, or at exit."""
    _running.add(threads)
    # Not at exit, where no thread can be started; see _end_all.
    weakref.finalize(owner, _end_beside, threads).atexit = False


def _end_beside(threads: EngineThreads) -> None:
    # The garbage collector may call this in a thread of the engine that holds the engine's lock.
    threading.Thread(target=threads.stop, args=(SECONDS,), name="ucm-prefetch-end", daemon=True).start()


@atexit.register
def _end_all() -> None:
    for threads in list(_running):
        threads.stop(SECONDS)
