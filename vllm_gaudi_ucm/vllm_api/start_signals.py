"""SIGTERM while a server starts: it ends the server and its engine at once, and is never lost.

Reason: until it serves, vLLM's server answers SIGTERM by KeyboardInterrupt (`run_server`), which the context in which
it waits for its engine takes for an ordinary end (`zmq_socket_ctx`): the server goes on to serve, or waits ten minutes
for an engine that has gone. The engine notes SIGTERM and looks at its note when it has loaded and warmed everything.
Remove when: `zmq_socket_ctx` lets KeyboardInterrupt pass, and `run_engine_core` can be interrupted.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

# vLLM's handlers that ours stands in for; a user's own, and the default, stay
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
    """From now on SIGTERM ends the start of this process, if its handler is vLLM's of that name.

    A server that is ready sets a handler of its own; an engine calls `start_is_over`.
    """
    handler = signal.getsignal(signal.SIGTERM)
    # handlers can be set in the main thread only, which is where both processes start
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and callable(handler) and getattr(handler, "__qualname__", None) == vllm_handler:
        signal.signal(signal.SIGTERM, _EndOfStart(handler))


def start_is_over() -> None:
    """Gives vLLM's handler back: from now on there are requests to abort, and stores to close."""
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _EndOfStart):
        signal.signal(signal.SIGTERM, handler.vllm_handler)
