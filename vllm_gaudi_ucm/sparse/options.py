"""Options of the sparse methods, by the seeds' names. Sources: seed 000 (GSA) 7.1, seed 002 (KVStar) 6.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.prefetch.options import (
    DEFAULT_CACHE_BYTES,
    MaxPendingPrefetch,
    PrefetchAhead,
    PrefetchCacheBytes,
    PrefetchCacheSize,
    PrefetchWorkers,
)


class MethodOptions(Section):
    """Base of every method's options."""


class BlockOptions(MethodOptions):
    """Options of every method that selects blocks by the scores of their summaries."""

    sparse_ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.3,
        description="Part of the context's full blocks that is attended, sinks and local window included.",
    )
    local_window_sz: Annotated[int, Field(ge=1)] = Field(
        default=2, description="Newest full blocks that are always attended, beside the partial tail."
    )
    init_window_sz: Annotated[int, Field(ge=0)] = Field(
        default=1, description="First blocks (sinks) that are always attended."
    )
    min_blocks: Annotated[int, Field(ge=1)] = Field(
        default=4, description="Least number of full blocks attended, sinks and local window included."
    )
    # Below 2048 tokens attention is a few per cent of a step, so that a selection costs quality and saves nothing.
    min_tokens: Annotated[int, Field(ge=1)] = Field(
        default=2048, description="Shortest context that is sparse, in tokens; below it a request is dense."
    )
    summary: Literal["mean", "minmax", "box_mean", "hash"] = Field(
        # in attention mass at blocks of 16 to 128 tokens nothing else came as close to the exact choice
        default="box_mean",
        description="What is kept of a full block's keys to score it: their mean, the smallest and largest value of "
        "each element, the keys farthest from the mean and the mean of the rest, or sign codes of these.",
    )


class EsaOptions(BlockOptions):
    """ESA chooses anew in every step and in every layer."""


class GsaOptions(BlockOptions):
    """GSA: a selection may serve several steps and several layers."""

    reuse_steps: Annotated[int, Field(ge=1)] = Field(
        default=1, description="Steps that one selection serves; 1 selects anew in every step."
    )
    reuse_layers: Annotated[int, Field(ge=1)] = Field(
        default=1, description="Consecutive layers that share the selection of the first of them."
    )
    dense_layers: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = Field(
        default=(), strict=False, description="Indices of layers that attend to the whole context."
    )
    prefetch_workers: PrefetchWorkers = 4
    max_pending_prefetch: MaxPendingPrefetch = 64
    prefetch_ahead: PrefetchAhead = 2
    prefetch_cache_size: PrefetchCacheSize = 1000
    prefetch_cache_bytes: PrefetchCacheBytes = DEFAULT_CACHE_BYTES


SWITCH = "ucm_sparse"
_PREFIX = "ucm_"


def read_extra_args(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether the request may be sparse, which it may unless it says no; keys without our prefix are not ours.

    Raises ValueError, which the server answers the request with.
    """
    if extra_args is None:
        return True
    for key in extra_args:
        if isinstance(key, str) and key.startswith(_PREFIX) and key != SWITCH:
            raise ValueError(f"extra_args[{key!r}]: found an unknown key, expected {SWITCH!r}; correct or remove it")
    switch = extra_args.get(SWITCH, True)
    # vLLM's server takes JSON's true and false in `vllm_xargs` as 1 and 0
    if not isinstance(switch, int) or switch not in (0, 1):
        raise ValueError(f"extra_args[{SWITCH!r}]: found {switch!r}, expected true or false")
    return bool(switch)
