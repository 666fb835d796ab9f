"""Bucket strategies by name. A new one is one file: a `BucketStrategy` with its options as fields."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.registry import Registry

if TYPE_CHECKING:  # the configuration imports the names and must stay light
    from vllm_gaudi_ucm.graphs.lookup import BucketSet
    from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest, BucketStrategy

STRATEGIES: Registry[type[BucketStrategy]] = Registry(
    "bucket strategy",
    "vllm_gaudi_ucm.bucket_strategies",
    exponential="vllm_gaudi_ucm.graphs.strategies.grid:Exponential",
    linear="vllm_gaudi_ucm.graphs.strategies.grid:Linear",
    padding_aware="vllm_gaudi_ucm.graphs.strategies.grid:PaddingAware",
    file="vllm_gaudi_ucm.graphs.strategies.file:FromFile",
)


def build_buckets(name: str, request: BucketRequest, options: Mapping[str, Any] | None = None) -> BucketSet:
    """The buckets of a strategy. Raises RegistryError, a ValueError that lists the known names, for an unknown one."""
    return STRATEGIES.get(name)(**(options or {})).choose(request)


def blind_strategies() -> list[str]:
    """Returns the strategies that know only the limits, not the traffic."""
    return [name for name in STRATEGIES.names() if STRATEGIES.get(name).needs is None]


def automatic_strategy(given: Container[str]) -> str:
    """Returns the strategy that `auto` stands for. given: the keys of `ucm.graphs` that name a file."""
    return "file" if "buckets" in given else "trace" if "trace" in given else "padding_aware"
