"""The buckets with which serving starts: few, quickly warm, and together large enough for every step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.warm_up.demand import Demand, Flags
from vllm_gaudi_ucm.graphs.warm_up.graph_key import BucketKey

# Logits rows cost little to pad (the output head is bound by its weights): beside the maximum there is one more at
# most, and only if it saves this share of what whole steps take. With 64 graphs the skeleton is then modelled to be
# warm within 8 to 10 % of the time that all of them need.
LOGITS_BUCKETS = 2
LEAST_LOGITS_SAVING = 0.01


class Skeleton(NamedTuple):
    """Forward shapes and logits rows, each with its maximum first: what cannot be warmed is found out at once."""

    forward: list[ForwardShape]
    logits: list[int]

    @property
    def keys(self) -> list[BucketKey]:
        """The order of warm-up: both maxima, with which any step can run, then the others."""
        return [self.forward[0], self.logits[0], *self.forward[1:], *self.logits[1:]]


def choose_skeleton(buckets: BucketSet, usage: Steps | None, count: int) -> Skeleton:
    """The configured maximum and up to `count - 1` further forward shapes, chosen greedily at the least padded cost.

    Args:
        buckets: the shapes to choose from.
        usage: steps that are expected; without them every bucket is expected to take the same share of the time.
        count: most forward shapes, at least 1.
    """
    if count < 1:
        raise ValueError(f"a skeleton of {count} forward buckets: expected at least 1, the configured maximum")
    forward, logits = Demand.of_forward(buckets, usage), Demand.of_logits(buckets, usage)
    shapes = _greedy(forward, count, 0.0)
    spent = forward.total_seconds(_flags(forward, shapes)) + logits.total_seconds(_flags(logits, [-1]))
    rows = _greedy(logits, LOGITS_BUCKETS, LEAST_LOGITS_SAVING * spent)
    return Skeleton([buckets.forward[index] for index in shapes], [buckets.logits[index] for index in rows])


def _greedy(demand: Demand, count: int, least: float) -> list[int]:
    """Indices of the buckets, the maximum first, then always the one that saves most, while it is more than `least`
    seconds."""
    chosen = [len(demand.sizes) - 1]
    while len(chosen) < count:
        warm = _flags(demand, chosen)
        savings = demand.savings(warm, ~warm)
        best = int(np.argmax(savings))
        if savings[best] <= least:
            break
        chosen.append(best)
    return chosen


def _flags(demand: Demand, chosen: list[int]) -> Flags:
    flags = np.zeros(len(demand.sizes), bool)
    flags[chosen] = True
    return flags
