"""The protocol of graph runners, the eager one, and the choice by kind of graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

StaticFunction = Callable[..., None]
"""A function of static tensors. Its results stay in tensors that outlive it: a graph returns nothing."""


class GraphRunner(Protocol):
    """Runs one function at static shapes. A key stands for one set of shapes.

    The inputs of a key are the same tensors in every call, with other contents: a graph reads fixed memory.
    Inputs may be nested in tuples; anything but a tensor is part of the graph.
    """

    def capture(self, key: Hashable, inputs: tuple[Any, ...]) -> None:
        """Executes the function for a key that is new, and keeps the graph of it."""

    def replay(self, key: Hashable, inputs: tuple[Any, ...]) -> None:
        """Executes the graph of a key.

        Raises:
            KeyError: the key was not captured.
        """

    def captured(self) -> int:
        """Graphs that are kept."""


class EagerRunner:
    """Calls the function. Keeps the keys, so that a shape that was never captured is an error, as on a device."""

    def __init__(self, function: StaticFunction) -> None:
        self._function = function
        self._keys: set[Hashable] = set()

    def capture(self, key: Hashable, inputs: tuple[Any, ...]) -> None:
        self._function(*inputs)
        self._keys.add(key)

    def replay(self, key: Hashable, inputs: tuple[Any, ...]) -> None:
        if key not in self._keys:
            raise KeyError(key)
        self._function(*inputs)

    def captured(self) -> int:
        return len(self._keys)


def runner_maker(kind: str) -> Callable[[StaticFunction], GraphRunner]:
    """Makes runners that may share memory: of all their functions, one runs at a time.

    kind: `cuda_graph`, `hpu_graph`, `eager`; or `compile`, where the function calls compiled code itself.
    """
    if kind == "cuda_graph":
        import torch

        from vllm_gaudi_ucm.graphs.runners.cuda import CudaGraphRunner

        pool = torch.cuda.graph_pool_handle()
        return lambda function: CudaGraphRunner(function, pool)
    if kind == "hpu_graph":
        from vllm_gaudi_ucm.graphs.runners.hpu_lazy import HpuGraphRunner

        return HpuGraphRunner
    return EagerRunner
