"""Workers of an engine as forks of a process with everything imported: in place of vLLM's spawned ones, in tests."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import process
from multiprocessing.context import ForkServerContext
from typing import Any

from tests.warm_process import kind_of_device


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
        return kind_of_device()(group, _run, name, call, daemon=daemon)


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
