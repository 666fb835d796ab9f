"""Values at which the modelled cost has grown by a bounded waste: close where size costs, wide where it is free."""

from __future__ import annotations

from functools import partial

import numpy as np

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost, Floats
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.strategies.grid import grid_buckets
from vllm_gaudi_ucm.graphs.strategies.request import BucketRequest


def padding_aware(request: BucketRequest) -> BucketSet:
    """Every step of one dimension multiplies the cost by the same factor, the smallest that the graphs allow."""
    return grid_buckets(request, partial(padding_aware_ladder, request.cost))


def padding_aware_ladder(cost: Cost, axis: str, maximum: int, n: int) -> list[int]:
    """n values that divide the growth of the cost along an axis, the other dimensions being small, in equal factors."""
    sizes = np.unique(np.geomspace(1, maximum, min(maximum, 2048)).astype(np.int64))
    seconds = _along(cost, axis, sizes)
    wanted = seconds[0] * (seconds[-1] / seconds[0]) ** (np.arange(1, n + 1) / n)
    # The largest size that a wanted cost still pays for: where size is free, one value covers it all.
    chosen = np.clip(np.searchsorted(seconds, wanted * (1 + 1e-12), side="right") - 1, 0, None)
    return sorted({*sizes[chosen].tolist(), maximum})


def _along(cost: Cost, axis: str, sizes: np.ndarray) -> Floats:
    if axis == "logits":
        return cost.logits_seconds(sizes)
    if axis == "shared":
        return cost.forward_seconds(False, 2, sizes, 0)
    if axis == "selected":
        return cost.forward_seconds(False, 1, 0, 0, sizes)
    if axis == "unique":
        return cost.forward_seconds(False, 1, 0, sizes)
    return cost.forward_seconds(axis == "prompt", sizes, 0, 0)
