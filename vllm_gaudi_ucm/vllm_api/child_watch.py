"""Engines and workers that neither answer nor die: processes that are stopped, and workers that wait for a dead one.

Imports nothing of vLLM.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import psutil

from vllm_gaudi_ucm.logger import plugin_logger

POLL_SECONDS = 1.0
# Looks, not seconds: whoever stops a server with all its processes (Ctrl-Z), and lets them go on, stops the looks, too.
STOPPED_LOOKS = 5
# for stores, which have five seconds for their writes and five for their threads
LEFT_LOOKS = 10
THREAD = "gaudi-ucm-child-watch"
_WORKER = "VllmWorker"
_WATCHED = ("EngineCore", _WORKER)
# at the end of work, and asked to end
_ORDERLY = (0, -signal.SIGTERM)

logger = plugin_logger(__name__)


class ChildWatch:
    """Kills what cannot end by itself, so that vLLM's own monitors end the engine with an error.

    children: those of this process that are alive.
    """

    def __init__(self, children: Callable[[], list[BaseProcess]] = multiprocessing.active_children) -> None:
        self._children = children
        self._stopped: dict[int, int] = {}
        self._workers: dict[int, BaseProcess] = {}
        self._looks_since_death = 0

    def look(self) -> None:
        """One look at all children. To be called once every `POLL_SECONDS`."""
        alive = {child.pid: child for child in self._children() if child.pid and child.name.startswith(_WATCHED)}
        for pid, child in alive.items():
            self._stopped[pid] = self._stopped.get(pid, 0) + 1 if _is_stopped(pid) else 0
            if self._stopped[pid] >= STOPPED_LOOKS:
                logger.error(
                    "%s (process %d) is stopped, and has not run for %d s; it is killed, so that its engine ends. "
                    "Who sent it SIGSTOP? `kill -CONT %d` within this time lets it go on.",
                    *(child.name, pid, STOPPED_LOOKS * POLL_SECONDS, pid),
                )
                child.kill()
        self._end_those_left(alive)

    def _end_those_left(self, alive: dict[int, BaseProcess]) -> None:
        workers = {pid: child for pid, child in alive.items() if child.name.startswith(_WORKER)}
        gone = [child for pid, child in self._workers.items() if pid not in workers]
        died = [child for child in gone if child.exitcode not in _ORDERLY]
        if not workers:
            self._workers, self._looks_since_death = {}, 0
            return
        self._workers |= workers
        names = [child.name for child in self._workers.values()]
        # of several engines of one process, whose workers have the same names, one may live without the other
        is_one_engine = len(set(names)) == len(names)
        self._looks_since_death = self._looks_since_death + 1 if died and is_one_engine else 0
        if self._looks_since_death >= LEFT_LOOKS:
            dead = ", ".join(f"{child.name} (exit status {child.exitcode})" for child in died)
            for child in workers.values():
                logger.error("%s (process %s) still waits for %s; it is killed.", child.name, child.pid, dead)
                child.kill()


def _is_stopped(pid: int) -> bool:
    """By a signal; a debugger's stop is another."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False  # it has just ended


def watch_children() -> None:
    """Watches the engines and workers that this process starts, now and later. Safe to call twice.

    Reason: vLLM notices when a worker or an engine dies. One that is stopped never answers: its clients wait for 300 s
    (`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`), and for an engine for ever. A worker in a collective with a dead one may
    wait as long as the collective does, and hear no signal meanwhile.
    Remove when: vLLM's executors and its server ask their processes for signs of life.
    """
    if all(thread.name != THREAD for thread in threading.enumerate()):
        threading.Thread(target=_watch, name=THREAD, daemon=True).start()


def _watch() -> None:
    watch = ChildWatch()
    while True:
        time.sleep(POLL_SECONDS)
        watch.look()
