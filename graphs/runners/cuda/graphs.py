"""CUDA graphs in one memory pool. Source: torch's notes on CUDA graphs, "Graph memory management"."""

from __future__ import annotations

from typing import Any

import torch

from vllm_gaudi_ucm.graphs.runners.base import Replay, StaticFunction


class CudaGraphRunner:
    """Captures on a stream of its own and replays on the current one.

    Args:
        function: the function to capture.
        pool: `torch.cuda.graph_pool_handle()`, shared by runners whose graphs never run at the same time: a graph's
            intermediate tensors are dead when it ends, so all of them together take the memory of the largest.
    """

    def __init__(self, function: StaticFunction, pool: Any) -> None:
        self._function = function
        self._pool = pool

    def capture(self, inputs: tuple[Any, ...]) -> Replay:
        # the first run on a side stream makes libraries allocate their workspaces outside the graph
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._function(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a capture in the warm-up thread must not forbid unsafe calls in other threads
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._function(*inputs)
        # capturing executes nothing: one replay, so that warm-up pays for all the work of a first replay
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay
