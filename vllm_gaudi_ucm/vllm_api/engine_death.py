"""Callers of `LLM` whose engine has died: each of their calls ends with an error.

Imports nothing of vLLM before an engine has died.
"""

from __future__ import annotations

import gc
import signal
import sys
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


def tell_waiting_callers(engine: BaseProcess) -> None:
    """Ends every call that waits for an answer of this engine's process, with an `EngineDeadError` that says why.

    Reason: `SyncMPClient`, the client of `LLM`, notices that its engine's process was killed and closes its socket. The
    thread that reads from it ends without a word to the queue in which the caller waits, for ever. The queue takes an
    exception, too, but the caller makes one of its own of it, without the reason. vLLM keeps no list of its clients:
    they are looked up among all objects, once, when an engine has died.
    Remove when: `process_outputs_socket` of `SyncMPClient` puts an error into the queue when it is shut down.
    """
    for client in _clients(engine):
        error = _error(engine)
        for answer in list(client.utility_results.values()):
            if not answer.done():
                answer.set_exception(error)
        queue: Any = client.outputs_queue
        queue.put_nowait(_DeadEngine(error))


def _clients(engine: BaseProcess) -> list[SyncMPClient]:
    """Those that started this process, complete or not."""
    module = sys.modules.get(_CLIENTS)
    if module is None:
        return []
    clients = [found for found in gc.get_objects() if type(found) is module.SyncMPClient]
    return [client for client in clients if hasattr(client, "outputs_queue") and engine in _processes(client)]


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
