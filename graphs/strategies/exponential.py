"""Values that grow by a constant factor along each dimension."""

from __future__ import annotations

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.strategies.grid import grid_buckets
from vllm_gaudi_ucm.graphs.strategies.request import BucketRequest


def exponential(request: BucketRequest) -> BucketSet:
    """Few buckets and a padding that is bounded by the factor, whatever the traffic."""
    return grid_buckets(request, exponential_ladder)


def exponential_ladder(axis: str, maximum: int, n: int) -> list[int]:
    """n values whose neighbours differ by the n-th root of the maximum."""
    return sorted({max(1, round(maximum ** (step / n))) for step in range(1, n + 1)} | {maximum})
