"""The life of an engine's process: a parent that dies, a signal while it starts, and its end.

Imports nothing of vLLM: the plugin's entry point calls `watch_parent` in every process of vLLM.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
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
    """Whether vLLM started this process for an engine.

    Reason: vLLM tells it by the process's name only, `EngineCore` or `EngineCore_DP<rank>`.
    Remove when: vLLM has a function for it.
    """
    return multiprocessing.current_process().name.startswith("EngineCore")


def watch_parent() -> None:
    """Ends this process, if it is an engine's, when the process that started it is gone. Safe to call twice.

    Reason: a server that was killed leaves its engine behind. vLLM's worker processes watch the engine, but an engine
    whose worker runs in its own process waits for requests forever, with the card. Linux can send a signal
    (PR_SET_PDEATHSIG), but when the *thread* ends that started the process, and `LLM(...)` may have been made in a
    thread that has ended since. So a thread looks for the parent.
    Remove when: `EngineCoreProc.run_engine_core` watches its parent.
    """
    if is_engine_process() and all(thread.name != THREAD for thread in threading.enumerate()):
        threading.Thread(target=_watch, name=THREAD, daemon=True).start()


def _watch() -> None:
    # unknown while a spawned process imports its main module
    while (parent := multiprocessing.parent_process()) is None:
        time.sleep(POLL_SECONDS)
    # an orphan's parent is init or a subreaper, never a process with the old parent's id
    while os.getppid() == parent.pid:
        time.sleep(POLL_SECONDS)
    logger.error("Process %s, which started this engine, is gone: the engine ends.", parent.pid)
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
    which it waits for its engine takes for an ordinary end (`zmq_socket_ctx`): the server goes on to serve, or waits
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
    """Gives vLLM's handler back: from now on there are requests to abort, and stores to close.

    Reason: the other half of `end_start_at_sigterm`.
    Remove when: as for `end_start_at_sigterm`.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _EndOfStart):
        signal.signal(signal.SIGTERM, handler.vllm_handler)


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


def leave_heap_to_the_system(is_closed: Callable[[], bool]) -> None:
    """Ends an engine's process without destroying its objects; does nothing in a user's own process.

    is_closed: asked after all other exit handlers; False after an error, whose exit status stays.

    Reason: the engine thaws its heap when it ends, and Python destroys 700,000 objects one by one: 3 to 5 s on a busy
    machine, in which the server lost patience and killed it. vLLM leaves the heap frozen on ROCm, where nanobind (of
    Triton) then complains of every type.
    Remove when: `EngineCoreProc.run_engine_core` ends so on every platform.
    """
    if is_engine_process():
        atexit.register(lambda: os._exit(0) if is_closed() else None)
