"""The choice of a graph runner by kind of graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.graphs.runners.base import EagerRunner, GraphRunner, StaticFunction

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler


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
