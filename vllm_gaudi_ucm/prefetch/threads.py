"""The engine's threads: started, ended, and replaced if one dies."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.prefetch.dispatcher import Dispatcher
from vllm_gaudi_ucm.prefetch.loads import LoadRunner
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome

logger = plugin_logger(__name__)


class EngineThreads:
    """Daemon threads. They refer to the dispatcher, not to the engine: an engine without references can end them.

    enter_thread: called first in each thread, such as to make the process's device current in it.
    """

    def __init__(
        self, dispatcher: Dispatcher, runner: LoadRunner, enter_thread: Callable[[], None] | None = None
    ) -> None:
        self._dispatcher = dispatcher
        self._runner = runner
        self._enter_thread = enter_thread
        self._threads: list[threading.Thread] = []
        self._change = threading.Lock()
        self._is_short = False  # a thread could not be started

    def alive(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Starts the threads; does nothing if they run already."""
        with self._change:
            if not self._dispatcher.is_running:
                with self._dispatcher.lock:
                    self._dispatcher.generation += 1
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                self._fill()

    def replace_dead(self, ending: threading.Thread | None = None) -> None:
        """Starts a thread for every one that has died, and for the one that is `ending`; quick if none has."""
        if ending is None and not self._is_short:
            return
        with self._change:
            self._is_short = False
            left = [thread for thread in self._threads if thread.is_alive() and thread is not ending]
            dead, self._threads = len(self._threads) - len(left), left
            if self._dispatcher.is_running:
                with self._dispatcher.lock:
                    self._dispatcher.counters.threads_replaced += dead
                self._fill()

    def stop(self, timeout: float) -> bool:
        """Cancels pending prefetches and ends the threads; False if one is still busy after `timeout` seconds.

        Such a thread is no longer part of the engine, and ends after its current block.
        """
        dispatcher, end = self._dispatcher, time.monotonic() + timeout
        with self._change:
            threads = self._threads
            if dispatcher.is_running:
                with dispatcher.lock:
                    dispatcher.generation += 1
                    for task in dispatcher.ledger.pending():
                        dispatcher.settle(task, PrefetchOutcome.CANCELLED)
                    dispatcher.idle.call(len(threads))
        # A dying thread waits for the lock above.
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._change, dispatcher.lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            dispatcher.cache.clear()
        return not any(thread.is_alive() for thread in threads)

    def _fill(self) -> None:
        generation = self._dispatcher.generation
        mine = sum(thread.name.endswith(f".{generation}") for thread in self._threads)
        for number in range(mine, self._dispatcher.options.prefetch_workers):
            name = f"ucm-prefetch-{number}.{generation}"
            thread = threading.Thread(target=self._run, args=(generation,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads for now: the next caller tries again
                self._is_short = True
                logger.error("prefetch: a thread of the engine could not be started: %s", error)
                return
            self._threads.append(thread)

    def _run(self, generation: int) -> None:
        try:
            self._enter()
            while loads := self._dispatcher.next_loads(generation):
                self._runner.run(loads)
        except BaseException as error:
            # Its current blocks are lost already; the others must not wait for the next call.
            logger.error("prefetch: a thread of the engine ended: %s: %s", type(error).__name__, error)
            self.replace_dead(threading.current_thread())

    def _enter(self) -> None:
        if self._enter_thread is None:
            return
        try:
            self._enter_thread()
        except Exception as error:
            logger.error("prefetch: a thread could not be set up for the device: %s", error)


SECONDS = 1.0

_running: weakref.WeakSet[EngineThreads] = weakref.WeakSet()


def end_with(owner: object, threads: EngineThreads) -> None:
    """Stops the threads once nothing refers to `owner`, or at exit."""
    _running.add(threads)
    # Not at exit, when no thread can be started; see _end_all.
    weakref.finalize(owner, _end_beside, threads).atexit = False


def _end_beside(threads: EngineThreads) -> None:
    # The garbage collector may call this in a thread of the engine that holds the engine's lock.
    threading.Thread(target=threads.stop, args=(SECONDS,), name="ucm-prefetch-end", daemon=True).start()


@atexit.register
def _end_all() -> None:
    for threads in list(_running):
        threads.stop(SECONDS)
