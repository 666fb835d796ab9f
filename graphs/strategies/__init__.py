"""Ways to choose buckets, by name: `STRATEGIES.get(name)(request)` gives a `BucketSet`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.registry import Registry

if TYPE_CHECKING:  # the configuration knows the names, and is light
    from vllm_gaudi_ucm.graphs.lookup import BucketSet
    from vllm_gaudi_ucm.graphs.strategies.request import BucketRequest

STRATEGIES: Registry[Callable[[BucketRequest], BucketSet]] = Registry(
    "bucket strategy",
    "vllm_gaudi_ucm.bucket_strategies",
    exponential="vllm_gaudi_ucm.graphs.strategies.grid:exponential",
    linear="vllm_gaudi_ucm.graphs.strategies.grid:linear",
    padding_aware="vllm_gaudi_ucm.graphs.strategies.grid:padding_aware",
    file="vllm_gaudi_ucm.graphs.strategies.file:from_file",
    trace="vllm_gaudi_ucm.graphs.strategies.trace:from_trace",
)
# Those of ours that need to know nothing but the limits.
BLIND_STRATEGIES = ("exponential", "linear", "padding_aware")


def build_buckets(name: str, request: BucketRequest) -> BucketSet:
    """The buckets of a strategy; an unknown name raises a ValueError that lists the known ones."""
    return STRATEGIES.get(name)(request)
