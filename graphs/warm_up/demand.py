"""Which buckets steps ask for, and what a bucket more would save them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats
from vllm_gaudi_ucm.graphs.lookup import BucketSet, cheapest_fit
from vllm_gaudi_ucm.graphs.shapes.steps import Steps, graph_array, shape_seconds

Flags = NDArray[np.bool_]

# What is expected weighs as much as this many steps that were really seen: half a minute of decoding at 30 ms.
PRIOR_STEPS = 1000.0
# Share of it that any bucket gets, whether or not the usage has it: so that the rest has an order too.
UNSEEN_SHARE = 0.05


class Demand:
    """Expected and observed steps, as weighted points over the buckets of one kind (forward shapes, or logits rows).

    Without usage the expectation is the same time in every bucket; a bucket that takes ten times as long has a tenth
    of the steps. Observed steps are counted at the bucket that they asked for.

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
        """Steps that asked for each bucket; only the thread that looks buckets up adds to it."""
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
        """[n] seconds that each candidate would save over all steps if it were there beside the `warm` ones.

        `warm` must hold the last bucket. What is no candidate saves 0.
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
        """Seconds of all steps in the `warm` buckets."""
        return float(self._seconds_in(warm) @ self._weights())

    def _seconds_in(self, warm: Flags) -> Floats:
        """[points] cost of the cheapest warm bucket for each."""
        indices = np.flatnonzero(warm)
        return self.seconds[indices[cheapest_fit(self.sizes[indices], self._points)]]

    def _weights(self) -> Floats:
        weights = self._expected.copy()
        weights[-len(self.seen) :] += self.seen
        return weights
