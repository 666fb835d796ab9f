"""Buckets that are the best found for observed steps."""

from __future__ import annotations

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.strategies.request import BucketRequest
from vllm_gaudi_ucm.graphs.tuning.tune import tune

DEFAULT_GRAPHS = 64


def from_trace(request: BucketRequest) -> BucketSet:
    """The padding of the traffic that was seen is the smallest; needs `request.steps`."""
    if request.steps is None:
        raise ValueError("bucket strategy trace needs the steps of a phase log")
    graphs = DEFAULT_GRAPHS if request.max_graphs is None else request.max_graphs
    return tune(request.steps, request.limits, request.cost, graphs, report=request.report)
