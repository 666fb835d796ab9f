"""Ends an engine's process when the process that started it is gone: a server that was killed leaves no engine behind.

Nobody else does: vLLM's worker processes watch the engine, but the engine, in whose process our worker runs, waits for
requests for ever, with the card. Linux can send a signal (PR_SET_PDEATHSIG), but when the *thread* ends that started
the process, and `LLM(...)` may have been made in a thread that has ended since. So a thread looks for the parent.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

from vllm_gaudi_ucm.logger import plugin_logger

POLL_SECONDS = 1.0
# for the step that runs, open requests and stores; nobody waits for the answers
GRACE_SECONDS = 5.0
THREAD = "gaudi-ucm-parent-watch"

logger = plugin_logger(__name__)


def is_engine_process() -> bool:
    """Whether vLLM started this process for an engine: it calls it `EngineCore`, or `EngineCore_DP<rank>`."""
    return multiprocessing.current_process().name.startswith("EngineCore")


def watch_parent() -> None:
    """Watches from now on, in an engine's process; does nothing in another, or where this was done before."""
    if is_engine_process() and all(thread.name != THREAD for thread in threading.enumerate()):
        threading.Thread(target=_watch, name=THREAD, daemon=True).start()


def _watch() -> None:
    # unknown while a process that was started anew imports what it is to run
    while (parent := multiprocessing.parent_process()) is None:
        time.sleep(POLL_SECONDS)
    # whose child is an orphan: init's, or a subreaper's; never a process with the parent's id
    while os.getppid() == parent.pid:
        time.sleep(POLL_SECONDS)
    logger.error("Process %s, which started this engine, is gone: the engine ends, too.", parent.pid)
    # without a handler it would end at once, and while it stops it has none
    if callable(signal.getsignal(signal.SIGTERM)):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)
