"""Chooses the buckets that cost observed steps the least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest, BucketStrategy, Source
from vllm_gaudi_ucm_tools.tuning.tune import tune

DEFAULT_GRAPHS = 64


@dataclass(frozen=True)
class FromTrace(BucketStrategy):
    """The least padding for the traffic of a phase log, `request.steps`."""

    needs: ClassVar[Source | None] = "trace"

    def choose(self, request: BucketRequest) -> BucketSet:
        if request.steps is None:
            raise ValueError("bucket strategy trace needs the steps of a phase log")
        graphs = DEFAULT_GRAPHS if request.max_graphs is None else request.max_graphs
        return tune(request.steps, request.limits, request.cost, graphs, report=request.report)
