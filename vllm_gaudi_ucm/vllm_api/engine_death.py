"""Callers of `LLM` whose engine has died: each of their calls ends with an error.

Imports nothing of vLLM before an engine has died.
"""

from __future__ import annotations

import signal
import sys
import weakref
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import SyncMPClient

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
