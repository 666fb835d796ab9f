"""The objective of tuning: the modelled seconds of observed steps, with a margin for larger ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost, Floats
from vllm_gaudi_ucm.graphs.lookup import BucketSet, cheapest_fit
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import flat_tiles
from vllm_gaudi_ucm.graphs.shapes.steps import Shapes, Steps, graph_array, shape_seconds

# A step a little larger than every bucket of a log runs in the configured maximum, which can cost a hundred times as
# much. Without a margin, buckets tuned on 4,000 steps cost 10 to 46 times too much on the next 4,000.
SPREAD = 0.25
NEAR_POINTS = 1500
FAR_POINTS = 150
FAR_SHARE = 0.02


def with_margin(steps: Steps, limits: Limits, margin: float) -> tuple[Shapes, NDArray[np.float64]]:
    """Returns (shapes, weights): the observed ones, and a share `margin` of the weight on larger ones near them.

    Shapes are [n, 6] if buckets bound the max prompt tiles and the log has them, else [n, 5] with a sparse method, else
    [n, 4].

    Most of the margin is on observed shapes whose sizes grew by a random factor (log-normal, about a quarter), a
    fiftieth of it on sizes anywhere between the observed ones and the limits. The same steps give the same margin.
    """
    observed = steps.shapes[:, : _dimensions(steps, limits)]
    if margin == 0.0:
        return observed, steps.forward_counts.astype(np.float64)
    rng = np.random.default_rng(0)
    shares = steps.forward_counts / steps.count
    near = observed[rng.choice(len(observed), NEAR_POINTS, p=shares)]
    sizes = observed.shape[1] - 1
    factors = np.exp(np.abs(rng.normal(0.0, SPREAD, (NEAR_POINTS, sizes))))
    near = _resized(near, np.ceil(near[:, 1:] * factors) + 1, limits)
    far = observed[rng.choice(len(observed), FAR_POINTS)]
    room = _maxima(far, limits) / np.maximum(far[:, 1:], 1)
    far = _resized(far, np.ceil(far[:, 1:] * room ** rng.random((FAR_POINTS, sizes))), limits)
    weight = margin * steps.count
    weights = [
        steps.forward_counts * (1.0 - margin),
        np.full(NEAR_POINTS, weight * (1.0 - FAR_SHARE) / NEAR_POINTS),
        np.full(FAR_POINTS, weight * FAR_SHARE / FAR_POINTS),
    ]
    return np.concatenate([observed, near, far]), np.concatenate(weights)


def _dimensions(steps: Steps, limits: Limits) -> int:
    if limits.bounds_prompt_tiles and steps.has_prompt_tiles:
        return 6
    return 5 if limits.max_selected_blocks else 4


def logits_with_margin(steps: Steps, limits: Limits, margin: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns (rows, weights): the observed rows and the largest; with a margin, all possible rows share it equally."""
    weights = np.full(limits.max_num_seqs, margin * steps.logits_counts.sum() / limits.max_num_seqs)
    weights[steps.logits - 1] += steps.logits_counts * (1.0 - margin)
    rows = np.flatnonzero(weights)
    rows = np.union1d(rows, [limits.max_num_seqs - 1])
    return rows + 1, weights[rows]


def _resized(shapes: Shapes, sizes: NDArray[np.float64], limits: Limits) -> Shapes:
    """Returns the shapes with other sizes, within the limits; a part that is absent stays absent."""
    resized = shapes.copy()
    resized[:, 1:] = np.where(shapes[:, 1:] > 0, np.minimum(sizes, _maxima(shapes, limits)), 0)
    return resized


def _maxima(shapes: Shapes, limits: Limits) -> NDArray[np.int64]:
    most = limits.maximum
    maxima = np.empty((len(shapes), shapes.shape[1] - 1), np.int64)
    maxima[:, 0] = np.where(shapes[:, 0] > 0, most.query_len, limits.max_decode_rows)
    maxima[:, 1:] = (*most.forward.sizes[1:4], flat_tiles(most.query_len))[: shapes.shape[1] - 2]
    return maxima


# The first rounding of sizes that is tried to shrink a large objective, as a share, and the factor to the next one.
FINEST_ROUNDING = 1e-3
WIDER = 1.3


@dataclass(frozen=True)
class Objective:
    """Weighted forward shapes and logits rows. A weight is a number of steps, not always an integer.

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
        """Makes the objective of observed steps, with a share `margin` of the weight on larger ones (see
        `with_margin`).
        """
        shapes, weights = _merged(*with_margin(steps, limits, margin))
        logits, logits_weights = logits_with_margin(steps, limits, margin)
        seconds = shape_seconds(cost, shapes)
        order = np.argsort(seconds, kind="stable")
        maximum = graph_array([limits.maximum.forward])[:, : shapes.shape[1]]
        return cls(
            shapes[order],
            seconds[order],
            weights[order],
            logits,
            logits_weights=logits_weights,
            maximum=maximum,
            cost=cost,
        )

    @property
    def true_seconds(self) -> float:
        """Returns the cost of the weighted steps without padding."""
        return float(self.seconds @ self.weights + self.cost.logits_seconds(self.logits) @ self.logits_weights)

    def padded_seconds(self, buckets: BucketSet) -> float:
        """Returns the cost of the weighted steps in `buckets`."""
        rows = np.array(buckets.logits)
        padded = self.cost.logits_seconds(rows[np.searchsorted(rows, self.logits)])
        forward = shape_seconds(self.cost, graph_array(buckets.forward))
        return float(forward[buckets.assign(self.shapes)] @ self.weights + padded @ self.logits_weights)

    def two_cheapest(self, shapes: Shapes) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Finds, among `shapes` and the maximum, the cheapest that dominates each step. Returns its index, its seconds,
        and the seconds of the second cheapest.

        An index refers to `shapes`; their number stands for the maximum. If only the maximum dominates a step, it is
        also the second.
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
        """Returns an objective of about `most` shapes or fewer, with sizes rounded down: it costs no more in any
        buckets.
        """
        coarse, rounding = self, FINEST_ROUNDING
        while len(coarse.shapes) > most and rounding < 1.0:
            coarse, rounding = self._rounded_down(1.0 + rounding), WIDER * rounding
        return coarse

    def _rounded_down(self, factor: float) -> Objective:
        """Rounds sizes down to the next integer power of `factor`, which merges similar steps."""
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
