"""Servers of forks: one has imported what all processes of tests need; others are its forks, and have vLLM, too."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
from multiprocessing import connection, forkserver, popen_forkserver, process, reduction, resource_tracker, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, set_spawning_popen

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["tests.warm_imports"])


class _ForkedServer(forkserver.ForkServer):
    """Forks from the server of `WARM` when it is first asked for a process, and ends with the one that asks."""

    def ensure_running(self) -> None:
        with self._lock:
            if self._forkserver_pid is not None:
                return
            resource_tracker.ensure_running()
            with socket.socket(socket.AF_UNIX) as listener:
                address = connection.arbitrary_address("AF_UNIX")
                listener.bind(address)
                listener.listen()
                readable, held = os.pipe()
                with Connection(readable, writable=False) as alive:
                    server = WARM.Process(target=_serve, args=(listener, alive, self._preload_modules), daemon=True)
                    server.start()
            self._forkserver_address, self._forkserver_alive_fd, self._forkserver_pid = address, held, server.pid


def _serve(listener: socket.socket, alive: Connection, modules: list[str]) -> None:
    """In the new server."""
    # else its forks take this parent for theirs until they know their own, and a worker thinks that it is gone
    vars(process)["_parent_process"] = None
    forkserver.main(listener.detach(), alive.fileno(), modules)


def _preloaded(module: str) -> _ForkedServer:
    server = _ForkedServer()
    server.set_forkserver_preload([module])
    return server


# Their forks are processes on the CPU, and on the simulated card; those of `WARM` have still to ask for their device.
_ON_CPU, _ON_CARD = _preloaded("tests.warm_workers"), _preloaded("tests.warm_cards")


class ProcessOnCpu(ForkServerProcess):
    """A process that forks from one with vLLM on the CPU."""

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> popen_forkserver.Popen:
        return _Popen(process_obj, _ON_CPU)


class ProcessOnCard(ForkServerProcess):
    """A process that forks from one with vLLM on the simulated card, in compile mode, where no card has started yet."""

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> popen_forkserver.Popen:
        return _Popen(process_obj, _ON_CARD)


class _Popen(popen_forkserver.Popen):
    def __init__(self, process_obj: process.BaseProcess, server: _ForkedServer) -> None:
        self._server = server
        super().__init__(process_obj)

    def _launch(self, process_obj: process.BaseProcess) -> None:
        """As in the base class, whose server is the only one that it knows."""
        request = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), request)
            reduction.dump(process_obj, request)
        finally:
            set_spawning_popen(None)
        self.sentinel, pipe = self._server.connect_to_new_process(self._fds)
        self.finalizer = util.Finalize(self, util.close_fds, (os.dup(pipe), self.sentinel))
        with open(pipe, "wb", closefd=True) as file:
            file.write(request.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)
