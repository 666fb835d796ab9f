"""The time of a captured graph on this GPU, by which ways to compute the same are compared at start."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

REPLAYS = 7


def graph_seconds(run: Callable[[], object], stream: torch.cuda.Stream | None) -> float:
    """Returns the seconds of a graph, captured and replayed on this stream, the median."""
    graph, found = torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    # without the garbage collection of torch.cuda.graph, which takes longer than all replays
    with torch.cuda.stream(stream):
        # libraries allocate what they need outside of the graph
        run()
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        finally:
            # an error in between must not leave the stream capturing
            graph.capture_end()
        graph.replay()
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)
