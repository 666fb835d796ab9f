"""The end of a server's process: its exit status, and an end without complaints.

Imports nothing of vLLM.
"""

import gc
import logging
import multiprocessing.util
import os
import signal
import sys

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.vllm_api.child_watch import failed_children

# functions of vLLM whose handlers of SIGTERM a server has while it starts, and one without requests while it runs
_STARTS = "run_server."
_RUNS = ("run_headless.", "run_multi_api_server.")
# after multiprocessing has ended the children of this process
_LAST = -100

logger = plugin_logger(__name__)
_ends: list[multiprocessing.util.Finalize] = []


def end_server_truly() -> None:
    """Lets a server that lost an engine or a worker end with status 1. Safe to call twice.

    To be called while the server starts. Does nothing in a user's own process, which gets an exception and may go on.

    Reason: the server stops serving when an engine has died, as if it had been asked to, and ends with status 0: a
    supervisor that restarts on failure takes that for a success. Its heap is frozen (`freeze_gc_heap`), so that
    nanobind (of Triton, which xgrammar imports) complains of hundreds of its objects; thawed, they are collected.
    Remove when: `serve_http` and `run_headless` raise when the engine has died, and `lifespan` thaws the heap.
    """
    if not _ends:
        is_server = _handler().startswith(_STARTS) or multiprocessing.current_process().name.startswith("ApiServer_")
        _ends.append(multiprocessing.util.Finalize(None, _end, (is_server,), exitpriority=_LAST))


def _handler() -> str:
    return getattr(signal.getsignal(signal.SIGTERM), "__qualname__", "")


def _end(is_server: bool) -> None:
    if not is_server and not _handler().startswith(_RUNS):
        return
    failed = failed_children()
    if not failed:
        gc.unfreeze()
        return
    logger.error("The server ends with status 1, because it lost %s.", ", ".join(failed))
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
