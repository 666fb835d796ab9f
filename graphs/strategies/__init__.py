"""Ways to choose buckets, by name: `STRATEGIES[name](request)` gives a `BucketSet`."""

from __future__ import annotations

from collections.abc import Callable

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.strategies.exponential import exponential
from vllm_gaudi_ucm.graphs.strategies.file import from_file
from vllm_gaudi_ucm.graphs.strategies.linear import linear
from vllm_gaudi_ucm.graphs.strategies.padding_aware import padding_aware
from vllm_gaudi_ucm.graphs.strategies.request import BucketRequest
from vllm_gaudi_ucm.graphs.strategies.trace import from_trace

STRATEGIES: dict[str, Callable[[BucketRequest], BucketSet]] = {
    "exponential": exponential,
    "linear": linear,
    "padding_aware": padding_aware,
    "file": from_file,
    "trace": from_trace,
}
# Those that need to know nothing but the limits.
BLIND_STRATEGIES = ("exponential", "linear", "padding_aware")


def build_buckets(name: str, request: BucketRequest) -> BucketSet:
    """The buckets of a strategy; an unknown name raises a ValueError that lists the known ones."""
    try:
        strategy = STRATEGIES[name]
    except KeyError:
        raise ValueError(f"bucket strategy {name!r} is unknown, expected one of {', '.join(STRATEGIES)}") from None
    return strategy(request)
