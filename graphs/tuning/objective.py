"""What tuning minimises: the modelled seconds of weighted steps, in as few graphs as are allowed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost, Floats
from vllm_gaudi_ucm.graphs.lookup import BucketSet, cheapest_fit
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.steps import Shapes, Steps, graph_array, shape_seconds
from vllm_gaudi_ucm.graphs.tuning.margin import logits_with_margin, with_margin

# The first rounding of sizes that is tried to make a large objective small, as a share, and the factor to the next.
FINEST_ROUNDING = 1e-3
WIDER = 1.3


@dataclass(frozen=True)
class Objective:
    """Weighted forward shapes and logits rows. A weight is a number of steps, not always a whole one.

    shapes: [n, d] distinct, in ascending order of seconds; d is 4 to 6 (see `with_margin`). seconds, weights: [n].
    logits: [m] ascending rows, the last one max_num_seqs. logits_weights: [m].
    maximum: [1, d] the configured maximum, which is always one of the shapes that have graphs.
    """

    shapes: Shapes
    seconds: Floats
    weights: Floats
    logits: NDArray[np.int64]
    logits_weights: Floats
    maximum: Shapes
    cost: Cost

    @classmethod
    def of(cls, steps: Steps, limits: Limits, cost: Cost, margin: float) -> Objective:
        """The observed steps, with a share `margin` of the weight on larger ones (see `with_margin`)."""
        shapes, weights = _merged(*with_margin(steps, limits, margin))
        logits, logits_weights = logits_with_margin(steps, limits, margin)
        seconds = shape_seconds(cost, shapes)
        order = np.argsort(seconds, kind="stable")
        maximum = graph_array([limits.maximum.forward])[:, : shapes.shape[1]]
        return cls(shapes[order], seconds[order], weights[order], logits, logits_weights, maximum, cost)

    @property
    def true_seconds(self) -> float:
        """What the weighted steps cost unpadded."""
        return float(self.seconds @ self.weights + self.cost.logits_seconds(self.logits) @ self.logits_weights)

    def padded_seconds(self, buckets: BucketSet) -> float:
        """What the weighted steps cost in `buckets`."""
        rows = np.array(buckets.logits)
        padded = self.cost.logits_seconds(rows[np.searchsorted(rows, self.logits)])
        forward = shape_seconds(self.cost, graph_array(buckets.forward))
        return float(forward[buckets.assign(self.shapes)] @ self.weights + padded @ self.logits_weights)

    def two_cheapest(self, shapes: Shapes) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Of `shapes` and the maximum: for each step the cheapest that dominates it, its seconds, the second's.

        The first is an index into `shapes` (their number: the maximum). Where nothing but the maximum dominates a
        step, that is also the second.
        """
        everything = np.concatenate([shapes, self.maximum])
        seconds = shape_seconds(self.cost, everything)
        order = np.lexsort((everything.sum(axis=1), seconds))
        found = cheapest_fit(everything[order], self.shapes)
        second = np.full(len(self.shapes), float(seconds[-1]))
        for place in range(len(order)):
            others, members = np.delete(order, place), found == place
            if members.any() and len(others):
                next_best = cheapest_fit(everything[others], self.shapes[members])
                second[members] = np.where(next_best >= 0, seconds[others][next_best], seconds[-1])
        return order[found], seconds[order[found]], second

    def coarse(self, most: int) -> Objective:
        """An objective of at most about `most` shapes that no buckets find dearer: sizes are rounded down."""
        coarse, rounding = self, FINEST_ROUNDING
        while len(coarse.shapes) > most and rounding < 1.0:
            coarse, rounding = self._rounded_down(1.0 + rounding), WIDER * rounding
        return coarse

    def _rounded_down(self, factor: float) -> Objective:
        """Sizes become the next smaller whole power of `factor`, so that steps nearly alike are one."""
        sizes = self.shapes[:, 1:]
        powers = np.floor(np.log(np.maximum(sizes, 1)) / np.log(factor))
        rounded = self.shapes.copy()
        # The logarithm may round up, hence the minimum.
        rounded[:, 1:] = np.where(sizes > 0, np.minimum(np.floor(factor**powers), sizes), 0)
        shapes, weights = _merged(rounded, self.weights)
        seconds = shape_seconds(self.cost, shapes)
        order = np.argsort(seconds, kind="stable")
        return replace(self, shapes=shapes[order], seconds=seconds[order], weights=weights[order])


def _merged(shapes: Shapes, weights: Floats) -> tuple[Shapes, Floats]:
    distinct, place = np.unique(shapes, axis=0, return_inverse=True)
    return distinct, np.bincount(place.reshape(-1), weights, len(distinct)).astype(np.float64)
