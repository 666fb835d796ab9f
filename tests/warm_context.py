"""Workers of an engine as forks of a process with everything imported: in place of vLLM's spawned ones, in tests."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, popen_forkserver, process, reduction, spawn, util
from multiprocessing.context import ForkServerContext, ForkServerProcess, set_spawning_popen
from typing import Any

from vllm.platforms import current_platform

# beside that of `warm_process`, whose forks have still to ask for their device
WORKERS = forkserver.ForkServer()
WORKERS.set_forkserver_preload(["tests.warm_workers"])


class WarmContext(ForkServerContext):
    """What vLLM takes for the context of `spawn`: a new process has the environment of the one that starts it."""

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(["tests.warm_imports"])

    def Process(  # type: ignore[override]  # a class there, of which vLLM uses the constructor
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},  # the signature of multiprocessing
        *,
        daemon: bool | None = None,
    ) -> process.BaseProcess:
        call = (dict(os.environ), list(sys.path), target, args, kwargs)
        kind = _Worker if current_platform.device_type == "cpu" else ForkServerProcess
        return kind(group, _run, name, call, daemon=daemon)


class _Worker(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> popen_forkserver.Popen:
        return _Popen(process_obj)


class _Popen(popen_forkserver.Popen):
    """Forks from the server of workers."""

    def _launch(self, process_obj: process.BaseProcess) -> None:
        """As in the base class, whose server is the only one that it knows."""
        request = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), request)
            reduction.dump(process_obj, request)
        finally:
            set_spawning_popen(None)
        self.sentinel, pipe = WORKERS.connect_to_new_process(self._fds)
        self.finalizer = util.Finalize(self, util.close_fds, (os.dup(pipe), self.sentinel))
        with open(pipe, "wb", closefd=True) as file:
            file.write(request.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


def _run(
    env: Mapping[str, str], path: list[str], target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = path
    # the server of forks is the parent that ends with the test, and that the worker watches
    parent = multiprocessing.parent_process()
    assert parent is not None
    vars(parent)["_pid"] = os.getppid()
    target(*args, **kwargs)
