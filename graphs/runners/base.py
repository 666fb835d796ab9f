"""The protocol of graph runners, the eager one, and the choice by kind of graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler

StaticFunction = Callable[..., None]
"""A function of static tensors. Its results stay in tensors that outlive it: a graph returns nothing."""


Replay = Callable[[], None]
"""Executes a graph on the current contents of its inputs."""


class GraphRunner(Protocol):
    """Makes graphs of one function at static shapes."""

    def capture(self, inputs: tuple[Any, ...]) -> Replay:
        """Executes the function, and returns its graph for these inputs.

        A graph reads fixed memory: its inputs are the same tensors in every replay, with other contents. They may be
        nested in tuples; anything but a tensor is part of the graph.
        """


class EagerRunner:
    """Calls the function."""

    def __init__(self, function: StaticFunction) -> None:
        self._function = function

    def capture(self, inputs: tuple[Any, ...]) -> Replay:
        self._function(*inputs)
        return partial(self._function, *inputs)


def runner_maker(kind: str, compiler: StaticCompiler | None = None) -> Callable[[StaticFunction], GraphRunner]:
    """Makes runners that may share memory: only one of their functions runs at a time.

    kind: `cuda_graph`, `hpu_graph`, `eager`; or `compile`, where the function calls regions of `compiler`.
    """
    if kind == "compile":
        from vllm_gaudi_ucm.graphs.runners.compiled import CompiledRunner

        assert compiler is not None, "kind 'compile' comes with a compiler"
        return lambda function: CompiledRunner(function, compiler)
    if kind == "cuda_graph":
        import torch

        from vllm_gaudi_ucm.graphs.runners.cuda.graphs import CudaGraphRunner

        pool = torch.cuda.graph_pool_handle()
        return lambda function: CudaGraphRunner(function, pool)
    if kind == "hpu_graph":
        from vllm_gaudi_ucm.graphs.runners.hpu.lazy import HpuGraphRunner

        return HpuGraphRunner
    return EagerRunner
