"""Makes graph runners by the name of their kind."""

from __future__ import annotations

from collections.abc import Callable

from vllm_gaudi_ucm.graphs.runners.base import EagerRunner, GraphRunner, StaticFunction


def runner_maker(kind: str) -> Callable[[StaticFunction], GraphRunner]:
    """Makes runners that may share memory: of all functions that it is called with, one runs at a time.

    kind: `cuda_graph`, `hpu_graph`, `eager`; or `compile`, where the function calls what is compiled already.
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
