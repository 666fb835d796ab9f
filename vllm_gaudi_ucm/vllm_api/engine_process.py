"""The life of an engine's process and of its workers': a parent that dies, a signal while it starts, and its end.

Imports nothing of vLLM: the plugin's entry point calls `watch_parent` in every process of vLLM.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_gaudi_ucm.envs import wait_for_engines_end
from vllm_gaudi_ucm.logger import plugin_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

POLL_SECONDS = 1.0
# for the running step, open requests and stores
GRACE_SECONDS = 5.0
THREAD = "gaudi-ucm-parent-watch"

logger = plugin_logger(__name__)


def is_engine_process() -> bool:
    """True if vLLM started this process for an engine.

    Reason: vLLM tells it by the process's name only, `EngineCore` or `EngineCore_DP<rank>`.
    Remove when: vLLM has a function for it.
    """
    return multiprocessing.current_process().name.startswith("EngineCore")


def is_worker_process() -> bool:
    """True if vLLM started this process for one worker of an engine with several.

    Reason: vLLM tells it by the process's name only, `VllmWorker-<rank>`.
    Remove when: vLLM has a function for it.
    """
    return multiprocessing.current_process().name.startswith("VllmWorker")


# engines and their workers, and further processes that a server of several engines starts
_OF_SERVER = ("EngineCore", "ApiServer_", "VLLM_DP_Coordinator", "VllmWorker")


def watch_parent() -> None:
    """Ends this process, if it is a server's child, when the process that started it is gone. Safe to call twice.

    Reason: a server that was killed leaves its engines behind, and with several of them their coordinator and the
    processes that answer HTTP. vLLM's worker processes watch their engine, but do not end while they wait in a
    collective, and an engine whose worker runs in its own process waits for requests forever, with the card. Linux can
    send a signal (PR_SET_PDEATHSIG), but when the *thread* ends that started the process, and `LLM(...)` may have been
    made in a thread that has ended since. So a thread looks for the parent.
    Remove when: `EngineCoreProc.run_engine_core`, `DPCoordinatorProc` and API servers watch their parent.
    """
    is_of_server = multiprocessing.current_process().name.startswith(_OF_SERVER)
    if is_of_server and all(thread.name != THREAD for thread in threading.enumerate()):
        threading.Thread(target=_watch, name=THREAD, daemon=True).start()


def _watch() -> None:
    # unknown while a spawned process imports its main module
    while (parent := multiprocessing.parent_process()) is None:
        time.sleep(POLL_SECONDS)
    # an orphan's parent is init or a subreaper, never a process with the old parent's id
    while os.getppid() == parent.pid:
        time.sleep(POLL_SECONDS)
    name = multiprocessing.current_process().name
    logger.error("Process %s, which started %s, is gone: this process ends, too.", parent.pid, name)
    # without a handler it would end at once, and while it stops it has none
    if callable(signal.getsignal(signal.SIGTERM)):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


# vLLM's handlers of SIGTERM that ours replaces; a user's own, and the default, stay
OF_SERVER = "run_server.<locals>._interrupt_init"
OF_ENGINE = "EngineCoreProc.run_engine_core.<locals>.signal_handler"


class _EndOfStart:
    """Raises SystemExit, with the status that a shell gives to a process that was terminated."""

    def __init__(self, vllm_handler: Callable[[int, FrameType | None], Any]) -> None:
        self.vllm_handler = vllm_handler

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        # notes it, should SystemExit be lost in a destructor
        with contextlib.suppress(KeyboardInterrupt):
            self.vllm_handler(number, frame)
        raise SystemExit(128 + number)


def end_start_at_sigterm(vllm_handler: str) -> None:
    """Lets SIGTERM end the start of this process at once, if its handler is vLLM's of that name.

    A server that is ready sets a handler of its own; an engine calls `start_is_over`.

    Reason: until it serves, vLLM's server answers SIGTERM by KeyboardInterrupt (`run_server`), which the context in
    which it waits for its engine treats as an ordinary end (`zmq_socket_ctx`): the server continues to serve, or waits
    ten minutes for an engine that has gone. The engine notes SIGTERM, and reads its note when it has loaded and warmed
    everything.
    Remove when: `zmq_socket_ctx` lets KeyboardInterrupt pass, and `run_engine_core` can be interrupted.
    """
    handler = signal.getsignal(signal.SIGTERM)
    # handlers can be set in the main thread only, which is where both processes start
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and callable(handler) and getattr(handler, "__qualname__", None) == vllm_handler:
        signal.signal(signal.SIGTERM, _EndOfStart(handler))


def start_is_over() -> None:
    """Restores vLLM's handler: from now on there are requests to abort, and stores to close.

    Reason: the other half of `end_start_at_sigterm`.
    Remove when: as for `end_start_at_sigterm`.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _EndOfStart):
        signal.signal(signal.SIGTERM, handler.vllm_handler)


class _Notice:
    """Notes SIGTERM, and hands it on to vLLM's handler."""

    def __init__(self, vllm_handler: Callable[[int, FrameType | None], Any]) -> None:
        self.vllm_handler = vllm_handler
        self.was_given = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.was_given = True
        self.vllm_handler(number, frame)


def sigterm_notice() -> Callable[[], bool]:
    """Returns a function that tells whether this process, if it is an engine's, was asked to end. Call it in the main
    thread, like `start_is_over`.

    Reason: an engine that was asked to end continues until its scheduler has no work, but the scheduler is not
    notified.
    Remove when: `SchedulerInterface` has a call for it.
    """
    handler = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or getattr(handler, "__qualname__", None) != OF_ENGINE:
        return lambda: False
    assert callable(handler)
    notice = _Notice(handler)
    signal.signal(signal.SIGTERM, notice)
    return lambda: notice.was_given


# after it, Python has run the handler of a signal or waits for a lock
_HANDLER_SECONDS = 0.5


def wake_at_sigterm() -> None:
    """Makes the main thread of an idle engine handle SIGTERM. Does nothing in a user's own process. Safe to call twice.

    Reason: an idle engine waits for a lock, without a time-out. Python runs a handler between two instructions of the
    main thread; a signal that comes after the last one, and before the wait has begun, is handled when the wait ends:
    never, so that the server kills the engine 20 s later. That is where an engine is when a server is stopped right
    after its start. A second signal, which does nothing, ends the wait for a moment.
    Remove when: `EngineCoreProc._process_input_queue` waits with a time-out.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not is_engine_process():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if former != -1:
        signal.set_wakeup_fd(former)
        os.close(reader)
        os.close(writer)
        return
    signal.signal(signal.SIGURG, lambda number, frame: None)
    threading.Thread(target=_wake, args=(reader,), name="gaudi-ucm-wake", daemon=True).start()


def _wake(reader: int) -> None:
    main = threading.main_thread().ident
    assert main is not None
    with open(reader, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if number[0] == signal.SIGTERM:
                time.sleep(_HANDLER_SECONDS)
                signal.pthread_kill(main, signal.SIGURG)


# More than stores may take to finish their writes (5 s) and to end their threads (5 s) on a busy machine; less than the
# 30 s after which Kubernetes kills. An engine that ends earlier is not waited for.
SHUTDOWN_SECONDS = 20


class ShutdownGrace(int):
    """Seconds that we chose, not the user. A type, because an attribute would not survive the way to the engine."""


def give_engine_time_to_stop(vllm_config: VllmConfig) -> None:
    """Lets the engine's process end by itself when the server is stopped, unless the user gave a time-out.

    Reason: with `--shutdown-timeout 0`, the default, the server kills the engine process right after it has asked it to
    stop: open streams are never ended, so the server waits for them forever, and the worker cannot write its summary.
    vLLM's XPU platform raises the same number; offline (`LLM`) it is a variable of the environment. The engine itself
    must still abort its requests at once instead of finishing them: `abort_at_shutdown` gives it its 0 back.
    Remove when: the server waits for the engine to abort its requests.
    """
    chosen = vllm_config.shutdown_timeout
    if chosen == 0 and not isinstance(chosen, ShutdownGrace):
        vllm_config.shutdown_timeout = ShutdownGrace(SHUTDOWN_SECONDS)
    wait_for_engines_end(SHUTDOWN_SECONDS)


def abort_at_shutdown(vllm_config: VllmConfig) -> None:
    """Makes an engine abort its requests at once when it is stopped, unless the user gave a time-out.

    The 0 is marked as ours, too: the engine checks its configuration once more after its worker has started.

    Reason: the engine's half of `give_engine_time_to_stop`.
    Remove when: as for `give_engine_time_to_stop`.
    """
    if isinstance(vllm_config.shutdown_timeout, ShutdownGrace):
        vllm_config.shutdown_timeout = ShutdownGrace(0)


def leave_heap_to_the_system(status: Callable[[], int | None]) -> None:
    """Ends the process of an engine or worker without destroying its objects; does nothing in a user's own process.

    status: called after all other exit handlers; None leaves everything to Python, as after an error of an engine.

    Reason: the engine thaws its heap when it ends, and Python destroys 700,000 objects one by one: 3 to 5 s on a busy
    machine, in which the server lost patience and killed it. vLLM leaves the heap frozen on ROCm, where nanobind (of
    Triton) then complains of every type.
    Remove when: `EngineCoreProc.run_engine_core` and `WorkerProc.worker_main` end so on every platform.
    """
    if is_engine_process() or is_worker_process():
        atexit.register(lambda: _exit(status()))


def _exit(status: int | None) -> None:
    if status is not None:
        os._exit(status)


_ends: list[multiprocessing.util.Finalize] = []


def leave_engines_heap_to_the_system() -> None:
    """Does the same for an engine whose workers have processes of their own and cannot tell how it ended.

    multiprocessing runs its finalizers while the exception is in flight that ends the process. Safe to call twice.

    Reason: as for `leave_heap_to_the_system`.
    Remove when: as for `leave_heap_to_the_system`.
    """
    if not _ends and is_engine_process():
        closed: list[bool] = []
        note = multiprocessing.util.Finalize(None, lambda: closed.append(_is_orderly(sys.exception())), exitpriority=0)
        _ends.append(note)
        leave_heap_to_the_system(lambda: 0 if closed == [True] else None)


def _is_orderly(end: BaseException | None) -> bool:
    return end is None or (isinstance(end, SystemExit) and not end.code)
