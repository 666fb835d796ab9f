"""The order of warm-up: the next bucket is always the one that saves the known steps the most seconds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats
from vllm_gaudi_ucm.graphs.lookup import BucketSet, cheapest_fit
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.steps import Steps, graph_array, shape_seconds
from vllm_gaudi_ucm.graphs.warm_up.records import BucketKey

Flags = NDArray[np.bool_]

# The expectation weighs as much as this number of observed steps: half a minute of decoding at 30 ms.
PRIOR_STEPS = 1000.0
# Share of it that is spread over all buckets, so that buckets outside the usage have an order.
UNSEEN_SHARE = 0.05


class Demand:
    """Expected and observed steps, as weighted points over the buckets of one kind (forward shapes, or logits rows).

    Without usage, the same time is expected in every bucket; a bucket that takes ten times as long has a tenth of the
    steps. Observed steps are counted at the bucket that they asked for.

    Args:
        sizes: [n, d] buckets, in ascending order of cost; the last one dominates all.
        seconds: [n] their cost.
        used: [m, d] shapes of earlier steps, within the last bucket; m may be 0.
        counts: [m] how often each occurred.
    """

    def __init__(
        self, sizes: NDArray[np.int64], seconds: Floats, used: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> None:
        self.sizes = sizes
        self.seconds = seconds
        self.seen = [0] * len(sizes)
        """Steps that asked for each bucket; only the look-up thread adds to it."""
        self._points = np.concatenate([used, sizes])
        unseen = 1.0 / np.maximum(seconds, np.finfo(np.float64).tiny)
        share = UNSEEN_SHARE if counts.sum() else 1.0
        expected = counts / max(counts.sum(), 1) * (1.0 - share)
        self._expected = PRIOR_STEPS * np.concatenate([expected, unseen / unseen.sum() * share])

    @classmethod
    def of_forward(cls, buckets: BucketSet, usage: Steps | None) -> Demand:
        """For forward shapes, by their index in `buckets.forward`."""
        sizes = graph_array(buckets.forward)
        used = sizes[:0] if usage is None else usage.shapes
        counts = np.zeros(0, np.int64) if usage is None else usage.forward_counts
        return cls(sizes, shape_seconds(buckets.cost, sizes), used, counts)

    @classmethod
    def of_logits(cls, buckets: BucketSet, usage: Steps | None) -> Demand:
        """For logits rows, by their index in `buckets.logits`."""
        sizes = np.array(buckets.logits, np.int64)[:, None]
        used = sizes[:0] if usage is None else usage.logits[:, None]
        counts = np.zeros(0, np.int64) if usage is None else usage.logits_counts
        return cls(sizes, np.asarray(buckets.cost.logits_seconds(sizes[:, 0]), np.float64), used, counts)

    def savings(self, warm: Flags, candidates: Flags) -> Floats:
        """Returns [n], the seconds that each candidate would save over all steps if added to the `warm` buckets.

        `warm` must hold the last bucket. Buckets that are not candidates save 0.
        """
        now = self._seconds_in(warm)
        weights = self._weights()
        open_points = np.flatnonzero((now > self.seconds[0]) & (weights > 0))
        points, now, weights = self._points[open_points], now[open_points], weights[open_points]
        saved = np.zeros(len(self.sizes))
        for index in np.flatnonzero(candidates):
            fits = (points <= self.sizes[index]).all(axis=1)
            saved[index] = np.clip(now[fits] - self.seconds[index], 0.0, None) @ weights[fits]
        return saved

    def total_seconds(self, warm: Flags) -> float:
        return float(self._seconds_in(warm) @ self._weights())

    def _seconds_in(self, warm: Flags) -> Floats:
        """Returns [points], the cost of the cheapest warm bucket for each."""
        indices = np.flatnonzero(warm)
        return self.seconds[indices[cheapest_fit(self.sizes[indices], self._points)]]

    def _weights(self) -> Floats:
        weights = self._expected.copy()
        weights[-len(self.seen) :] += self.seen
        return weights


class WarmUpOrder:
    """Weighs buckets by steps x seconds saved against what is warm; live steps change the weights.

    Args:
        usage: steps that are expected, e.g. those of a phase log.
    """

    def __init__(self, buckets: BucketSet, usage: Steps | None) -> None:
        forward, logits = Demand.of_forward(buckets, usage), Demand.of_logits(buckets, usage)
        self._kinds: tuple[tuple[Sequence[BucketKey], Demand], ...] = (
            (buckets.forward, forward),
            (buckets.logits, logits),
        )
        self._places = {key: (demand.seen, index) for keys, demand in self._kinds for index, key in enumerate(keys)}

    def count(self, key: BucketKey) -> None:
        """Counts a step that asked for `key` while it was cold. One thread may call it; another may call `first`."""
        seen, index = self._places[key]
        seen[index] += 1

    def first(self, cold: Collection[BucketKey], warm: Collection[BucketKey]) -> BucketKey | None:
        """Returns the next of `cold` to warm, or None if `cold` is empty. A maximum comes first: without it steps
        cannot run.

        Equal savings leave the order of cost, so that the same steps always give the same order.
        """
        missing = [keys[-1] for keys, _ in self._kinds if keys[-1] in cold]
        if missing or not cold:
            return missing[0] if missing else None
        best = [self._best(keys, demand, cold, warm) for keys, demand in self._kinds]
        return max(best, key=lambda found: found[0])[1]

    @staticmethod
    def _best(
        keys: Sequence[BucketKey], demand: Demand, cold: Collection[BucketKey], warm: Collection[BucketKey]
    ) -> tuple[float, BucketKey]:
        """Returns (seconds saved, key); the seconds are negative if none of the kind is cold."""
        candidates = np.array([key in cold for key in keys])
        savings = np.where(candidates, demand.savings(np.array([key in warm for key in keys]), candidates), -1.0)
        index = int(np.argmax(savings))
        return float(savings[index]), keys[index]


# Logits rows cost little to pad (the output head is bound by its weights): in addition to the maximum there is at most
# one, and only if it saves this share of the time of whole steps. With 64 graphs the skeleton is then modelled to be
# warm within 8 to 10 % of the time that all of them need.
LOGITS_BUCKETS = 2
LEAST_LOGITS_SAVING = 0.01


class Skeleton(NamedTuple):
    """Forward shapes and logits rows, each with its maximum first: a maximum that cannot be warmed fails at once."""

    forward: list[ForwardShape]
    logits: list[int]

    @property
    def keys(self) -> list[BucketKey]:
        """The order of warm-up: both maxima, with which any step can run, then the others."""
        return [self.forward[0], self.logits[0], *self.forward[1:], *self.logits[1:]]


def choose_skeleton(buckets: BucketSet, usage: Steps | None, count: int) -> Skeleton:
    """Chooses the configured maximum and up to `count - 1` further forward shapes, chosen greedily at the least padded
    cost.

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
    """Returns indices of buckets: the maximum, then always the one that saves most, if more than `least` seconds."""
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
