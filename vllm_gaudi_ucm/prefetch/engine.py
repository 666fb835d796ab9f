"""GSA's prefetch engine: loads KV blocks during computation, each request within a deadline."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import msgspec

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.prefetch.dispatcher import Dispatcher
from vllm_gaudi_ucm.prefetch.loads import Allocate, BlockReader, LoadRunner, broken_law
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.stats import PrefetchStats
from vllm_gaudi_ucm.prefetch.tasks import Deliver, PrefetchOutcome, PrefetchPriority, PrefetchTask
from vllm_gaudi_ucm.store.base import KvStore


def host_memory(nbytes: int) -> memoryview:
    """Allocates pageable memory; for a device that copies from pinned memory, callers pass their own allocator."""
    return memoryview(bytearray(nbytes))


class PrefetchHandle:
    """A handle of one prefetch, valid even if its request's id is reused. task: to be read under its lock."""

    def __init__(self, task: PrefetchTask, dispatcher: Dispatcher) -> None:
        self.task = task
        self._dispatcher = dispatcher

    @property
    def request_id(self) -> str:
        return self.task.request_id

    @property
    def outcome(self) -> PrefetchOutcome | None:
        """The outcome; None while it is pending. Once it is set, no `deliver` of this prefetch runs or will run."""
        return self._dispatcher.outcome_of(self.task)

    @property
    def failed(self) -> frozenset[int]:
        """The indices of blocks that did not arrive; complete once there is an outcome."""
        return self._dispatcher.failed_of(self.task)

    def wait(self, timeout: float | None = None) -> PrefetchOutcome:
        """Waits and returns the outcome, or TIMEOUT after `timeout` seconds; None waits up to the deadline."""
        return self._dispatcher.wait(self.task, timeout)

    def cancel(self) -> bool:
        """Cancels the prefetch; True if it was pending until now."""
        return self._dispatcher.cancel(self.task)

    def __repr__(self) -> str:
        return f"PrefetchHandle({self.request_id!r}, {self.outcome or 'pending'})"


class PrefetchEngine:
    """Loads blocks from a store into host memory and, if a `deliver` is given, on to the device. Source: seed 000, 3.

    Priorities decide which blocks a free thread takes next, a few at a time (`KvStore.batch_bytes`): an urgent request
    overtakes a large one in the middle. A block that several requests want is read once. Every method may be called
    from any thread; only `wait_for_completion`, `wait_for_any`, `drain` and `stop` wait.

    Args:
        store: holds the blocks; the caller closes it, after `stop`.
        block_bytes: size of a block, of all layers.
        options: see PrefetchOptions. Raises UcmConfigError if `prefetch_cache_bytes` has no room for a block.
        clock: seconds; for deadlines, ageing and figures.
        allocate: makes the host buffers, of `block_bytes` each.
        enter_thread: called first in each thread of the engine.
    """

    def __init__(
        self,
        store: KvStore,
        block_bytes: int,
        options: PrefetchOptions,
        clock: Callable[[], float] = time.monotonic,
        allocate: Allocate = host_memory,
        enter_thread: Callable[[], None] | None = None,
    ) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes: found {block_bytes}, expected the bytes of a block")
        self.options = options = options.for_blocks_of(block_bytes)
        self._block_bytes = block_bytes
        self._dispatcher = Dispatcher(options, clock, max(1, store.batch_bytes // block_bytes), store.waits)
        runner = LoadRunner(self._dispatcher, BlockReader(self._dispatcher, store, block_bytes, allocate))
        self._threads = EngineThreads(self._dispatcher, runner, enter_thread)
        end_with(self, self._threads)

    def start(self) -> None:
        """Starts the threads, also after a `stop`; does nothing if they run."""
        self._threads.start()

    def stop(self, timeout: float = 5.0) -> bool:
        """Cancels every prefetch and ends the threads. False if one was still busy with a block after `timeout`
            seconds.

        Safe to call twice. Later prefetches are CANCELLED at once, until the next `start`.
        """
        return self._threads.stop(timeout)

    def submit_prefetch(
        self,
        request_id: str,
        block_keys: Sequence[bytes],
        priority: PrefetchPriority = PrefetchPriority.NORMAL,
        deliver: Deliver | None = None,
        deadline: float | None = None,
    ) -> PrefetchHandle:
        """Starts to load blocks, the first key first; returns at once.

        Args:
            request_id: an earlier prefetch of the same id is cancelled and forgotten.
            deliver: called with the index and the bytes of each block, in a thread of the engine; an exception fails
                that block. Without it, blocks stay in the engine's host memory, and the prefetch counts towards
                `max_pending_prefetch`.
            deadline: seconds after which it is given up; the option `deadline` without it.
        """
        self._threads.replace_dead()
        seconds = self.options.deadline if deadline is None else deadline
        if type(priority) is not PrefetchPriority:
            priority = PrefetchPriority(priority)
        task = self._dispatcher.submit(request_id, block_keys, priority, deliver, seconds)
        return PrefetchHandle(task, self._dispatcher)

    def wait_for_completion(self, request_id: str, timeout: float | None = None) -> PrefetchOutcome:
        """Waits for the outcome up to `timeout` seconds (then TIMEOUT), and never beyond the request's deadline."""
        self._threads.replace_dead()
        with self._dispatcher.lock:
            task = self._dispatcher.ledger.find(request_id)
        return PrefetchOutcome.UNKNOWN if task is None else self._dispatcher.wait(task, timeout)

    def wait_for_any(self, handles: Sequence[PrefetchHandle], timeout: float) -> bool:
        """Waits until one of these prefetches has an outcome; False after `timeout` seconds, or without any handle."""
        tasks = [handle.task for handle in handles]
        with self._dispatcher.lock:
            return self._dispatcher.settled.wait_for(
                lambda: any(task.outcome is not None for task in tasks), timeout if tasks else 0
            )

    def outcome(self, request_id: str) -> PrefetchOutcome | None:
        """Returns the outcome; None while it is pending."""
        with self._dispatcher.lock:
            task = self._dispatcher.ledger.find(request_id)
        return PrefetchOutcome.UNKNOWN if task is None else self._dispatcher.outcome_of(task)

    def get_prefetched_kv(self, request_id: str) -> list[memoryview] | None:
        """Returns the blocks of a READY request, in the order of its keys; None otherwise, or if one was evicted.

        The caller may read their memory until `forget`, or the next prefetch of the same id.
        """
        with self._dispatcher.lock:
            task = self._dispatcher.ledger.find(request_id)
            if task is None or task.outcome is not PrefetchOutcome.READY:
                return None
            cache = self._dispatcher.cache
            if not task.held and all(key in cache for key in task.keys):
                task.hold([slot for key in task.keys if (slot := cache.use(key)) is not None])
            if len(task.held) != len(task.keys):
                return None
            return [slot.buffer for slot in task.held if slot.buffer is not None]

    def reprioritise(self, request_id: str, priority: PrefetchPriority) -> bool:
        """Changes the priority of blocks not dispatched yet; False if the request is not pending."""
        with self._dispatcher.lock:
            task = self._dispatcher.ledger.find(request_id)
            if task is None or not task.is_open:
                return False
            task.move(PrefetchPriority(priority))
            if task in self._dispatcher.queue:
                self._dispatcher.queue.put(task)
            return True

    def cancel(self, request_id: str) -> bool:
        """Gives up blocks that have not arrived; True if the request was pending. `deliver` may still run (`drain`)."""
        with self._dispatcher.lock:
            task = self._dispatcher.ledger.find(request_id)
            return task is not None and self._dispatcher.settle(task, PrefetchOutcome.CANCELLED)

    def drain(self, request_id: str, timeout: float) -> bool:
        """Cancels, and waits until no `deliver` of this id runs: none will run afterwards. False after `timeout` s."""
        self.cancel(request_id)
        return self._dispatcher.drained(request_id, timeout)

    def forget(self, request_id: str) -> None:
        """Cancels if pending, and drops everything about the id: its outcome is UNKNOWN, its memory reusable."""
        with self._dispatcher.lock:
            task = self._dispatcher.ledger.find(request_id)
            if task is not None:
                task.forget()
                self._dispatcher.settle(task, PrefetchOutcome.CANCELLED)
                self._dispatcher.ledger.forget(request_id)

    def stats(self) -> PrefetchStats:
        """Returns a copy of the totals, and the engine's current content."""
        threads = self._threads.alive()
        with self._dispatcher.lock:
            dispatcher = self._dispatcher
            depths = dispatcher.queue.depths()
            return PrefetchStats(
                **msgspec.structs.asdict(dispatcher.counters),
                outcomes={outcome: dispatcher.ledger.outcomes[outcome] for outcome in PrefetchOutcome},
                queue_depth={priority: depths[priority] for priority in PrefetchPriority},
                pending=len(dispatcher.ledger),
                threads=threads,
                cache_blocks=dispatcher.cache.blocks,
                cache_bytes=dispatcher.cache.allocated * self._block_bytes,
                evictions=dispatcher.cache.evictions,
            )

    def check_integrity(self) -> None:
        """Raises RuntimeError that names a violated conservation law."""
        with self._dispatcher.lock:
            broken = broken_law(self._dispatcher)
        if broken is not None:
            raise RuntimeError(f"prefetch engine: {broken}")


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
                self._runner.run_loads(loads)
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
