"""Values at equal distances along each dimension."""

from __future__ import annotations

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.strategies.grid import grid_buckets
from vllm_gaudi_ucm.graphs.strategies.request import BucketRequest


def linear(request: BucketRequest) -> BucketSet:
    """Little padding near the limits, much of it far below them."""
    return grid_buckets(request, linear_ladder)


def linear_ladder(axis: str, maximum: int, n: int) -> list[int]:
    """n values at distances of maximum / n."""
    return sorted({-(-maximum * step // n) for step in range(1, n + 1)})
