"""Engines and workers that neither answer nor die: processes that are stopped, and workers that wait for a dead one.

An engine that has died is reported to callers that still wait for it: each of their calls ends with an error. Imports
nothing of vLLM before that.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from vllm_gaudi_ucm.logger import plugin_logger

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import SyncMPClient


POLL_SECONDS = 1.0
# Counted in looks, not seconds: stopping and continuing a server with all its processes (Ctrl-Z) stops the looks, too.
STOPPED_LOOKS = 5
# for stores, which have five seconds for their writes and five for their threads
LEFT_LOOKS = 10
THREAD = "gaudi-ucm-child-watch"
_ENGINE = "EngineCore"
_WORKER = "VllmWorker"
_WATCHED = (_ENGINE, _WORKER)
# at the end of work, and asked to end
_ORDERLY = (0, -signal.SIGTERM)

logger = plugin_logger(__name__)


class ChildWatch:
    """Kills processes that cannot end by themselves, so that vLLM's own monitors end the engine with an error.

    children: those of this process that are alive.
    engine_ended: called once with each engine that has ended, for any reason.
    engine_started: called after a look that has found a new engine.
    """

    def __init__(
        self,
        children: Callable[[], list[BaseProcess]],
        engine_ended: Callable[[BaseProcess], None],
        engine_started: Callable[[], None] = lambda: None,
    ) -> None:
        self._children = children
        self._engine_ended, self._engine_started = engine_ended, engine_started
        self._started: dict[int, BaseProcess] = {}
        self._ended: list[BaseProcess] = []
        self._without_outputs: list[BaseProcess] = []
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
        if any(child.name.startswith(_ENGINE) for pid, child in alive.items() if pid not in self._started):
            self._engine_started()
        self._report_ended(alive)
        self._end_those_left(alive)

    def ended(self, name: str = "") -> list[BaseProcess]:
        """Engines and workers that have ended, since the last look, too. name: how theirs begins."""
        found = [*self._ended, *(child for child in list(self._started.values()) if not child.is_alive())]
        return [child for child in found if child.name.startswith(name)]

    def failed(self) -> list[str]:
        """Returns the names of processes that ended by an error or were killed, except those that were asked to end."""
        found = [child for child in self.ended() if child.exitcode not in _ORDERLY or child in self._without_outputs]
        return [child.name for child in found]

    def outputs_ended_as_asked(self) -> bool:
        """See the function; an engine that still runs then has failed, however it ends."""
        self._without_outputs += [child for child in self._started.values() if child.is_alive()]
        return bool(self.ended(_ENGINE)) and not self._without_outputs and not self.failed()

    def _report_ended(self, alive: dict[int, BaseProcess]) -> None:
        self._started |= alive
        for pid in self._started.keys() - alive.keys():
            child = self._started.pop(pid)
            self._ended.append(child)
            if child.name.startswith(_ENGINE):
                self._engine_ended(child)

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
    """True if a process was stopped by a signal; a debugger's stop is different."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False  # it has just ended


_watch: ChildWatch | None = None
"""The watch of this process, run by the thread `THREAD`."""


def watch_children() -> None:
    """Watches the engines and workers that this process starts, now and later. Safe to call twice.

    Reason: vLLM notices when a worker or an engine dies. A stopped worker never answers: its clients wait for 300 s
    (`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`), and those of a stopped engine forever. A worker in a collective with a dead
    one may wait as long as the collective does, and cannot handle signals meanwhile.
    Remove when: vLLM's executors and its server check that their processes are alive.
    """
    global _watch
    if all(thread.name != THREAD for thread in threading.enumerate()):
        callers = WaitingCallers()
        _watch = ChildWatch(multiprocessing.active_children, callers.tell, callers.look)
        threading.Thread(target=_look_for_ever, args=(_watch,), name=THREAD, daemon=True).start()


def failed_children() -> list[str]:
    """Names of this process's engines and workers that ended by an error or were killed, since `watch_children`.

    Reason: vLLM's server keeps no record of how its engines ended, and ends with status 0.
    Remove when: as for `end_server_truly`.
    """
    return [] if _watch is None else _watch.failed()


def outputs_ended_as_asked() -> bool:
    """True if the engines of a server that can no longer read their outputs were asked to end; otherwise they have
    failed.

    Reason: vLLM's log does not tell an engine that was asked to end from one that died. A server also asks a dead
    engine to end, and thereby kills it while it closes its workers.
    Remove when: as for `leave_out_untrue_lines`.
    """
    return _watch is not None and _watch.outputs_ended_as_asked()


def _look_for_ever(watch: ChildWatch) -> None:
    while True:
        time.sleep(POLL_SECONDS)
        watch.look()


_CLIENTS = "vllm.v1.engine.core_client"


class _DeadEngine:
    """Takes the place of an engine's outputs in the queue that a caller waits for, and raises when it is read."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @property
    def wave_complete(self) -> NoReturn:
        raise self._error


class WaitingCallers:
    """The clients of `LLM` in this process, and the end of their calls when their engine has died.

    Reason: `SyncMPClient`, the client of `LLM`, notices that its engine's process was killed and closes its socket. The
    thread that reads from it ends without notifying the queue in which the caller waits, forever. The queue also
    accepts an exception, but the caller replaces it by its own, without the reason. vLLM keeps no list of its clients:
    they are looked up among the finalizers of this process while their engine lives, since a client that is shut down
    has none. Searching all objects of the collector is not an option: a reference to a tuple that another thread is
    building makes that thread raise a SystemError.
    Remove when: `process_outputs_socket` of `SyncMPClient` puts an error into the queue when it is shut down.
    """

    def __init__(self) -> None:
        self._clients: weakref.WeakSet[SyncMPClient] = weakref.WeakSet()

    def look(self) -> None:
        """Finds the clients that were made since the last look."""
        module = sys.modules.get(_CLIENTS)
        if module is None:
            return
        # the copy is made at once; other threads add and remove finalizers
        for finalizer in vars(weakref.finalize)["_registry"].copy():
            alive = finalizer.peek()
            if alive is not None and type(alive[0]) is module.SyncMPClient:
                self._clients.add(alive[0])

    def tell(self, engine: BaseProcess) -> None:
        """Ends every call that waits for an answer of this engine's process, with an `EngineDeadError` that gives the
        reason.

        engine: has ended; it was alive at an earlier look.
        """
        for client in list(self._clients):
            if not hasattr(client, "outputs_queue") or engine not in _processes(client):
                continue
            error = _error(engine)
            for answer in list(client.utility_results.values()):
                if not answer.done():
                    answer.set_exception(error)
            queue: Any = client.outputs_queue
            queue.put_nowait(_DeadEngine(error))


def _processes(client: SyncMPClient) -> list[BaseProcess]:
    manager: Any = client.resources.engine_manager
    return getattr(manager, "processes", [])


def _error(engine: BaseProcess) -> Exception:
    from vllm.v1.engine.exceptions import EngineDeadError

    error = EngineDeadError()
    error.args = (
        f"{engine.name} (process {engine.pid}) ended: {_reason(engine.exitcode)}. Its requests are lost; the log above "
        "may say more. Make a new LLM to go on.",
    )
    return error


def _reason(status: int | None) -> str:
    if status is None or status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = ", as the kernel does for want of memory" if -status == signal.SIGKILL else ""
    return f"it was killed by {name}{hint}"
