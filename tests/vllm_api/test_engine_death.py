"""Callers of `LLM` are found and told when their engine has died, and no other thread notices the search."""

from __future__ import annotations

import threading
import weakref
from multiprocessing import Process
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_gaudi_ucm.vllm_api.child_watch import WaitingCallers


def client_of(*engines: Process) -> Any:
    """A client as vLLM makes it, without an engine."""
    client: Any = SyncMPClient.__new__(SyncMPClient)
    vars(client).update(
        resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=list(engines))),
        outputs_queue=Queue(),
        utility_results={},
        _finalizer=weakref.finalize(client, int),
    )
    return client


def test_vllm_gives_each_client_a_finalizer() -> None:
    """It is made before anything that may fail, with the client as its object."""
    names = SyncMPClient.__mro__[1].__init__.__code__.co_names  # type: ignore[misc]
    assert {"weakref", "finalize", "_finalizer"} <= set(names)


def test_callers_of_an_engine_that_died_are_told() -> None:
    """A client that vLLM has shut down meanwhile is told, too: its caller may still wait."""
    died, lives = Process(name="EngineCore_DP0"), Process(name="EngineCore_DP1")
    clients = [client_of(died), client_of(lives)]
    callers = WaitingCallers()
    callers.look()
    clients[0]._finalizer.detach()
    callers.tell(died)
    with pytest.raises(EngineDeadError, match="EngineCore_DP0"):
        _ = clients[0].outputs_queue.get_nowait().wave_complete
    assert clients[1].outputs_queue.empty()


def test_clients_are_not_kept_alive() -> None:
    callers, client = WaitingCallers(), client_of()
    callers.look()
    found = weakref.ref(client)
    del client
    assert found() is None


def test_other_threads_may_build_tuples_meanwhile() -> None:
    """A thread that builds a tuple of a generator gets a SystemError if another one takes a reference to it."""
    engine, callers, done = Process(name="EngineCore_DP0"), WaitingCallers(), threading.Event()
    client = client_of(engine)

    def search() -> None:
        for _ in range(5):
            callers.look()
            callers.tell(engine)
        done.set()

    thread = threading.Thread(target=search)
    thread.start()
    while not done.is_set():
        tuple([] for _ in range(20_000))
    thread.join()
    assert client.outputs_queue.qsize() == 5
