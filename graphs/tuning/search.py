"""Searches for k forward shapes that cover observed ones at the least total cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost, Floats
from vllm_gaudi_ucm.graphs.lookup import cheapest_fit
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.steps import Shapes, shape_seconds
from vllm_gaudi_ucm.graphs.tuning.exchange import exchange, price_table

Indices = NDArray[np.int64]
Report = Callable[[float], None]
"""Called with the fraction that is done."""

# Clusters that splitting makes for each one that is wanted, before merging begins.
OVERSPLIT = 6
# Exchanges look at this many clusters instead of at every point; what is left is settled on the points themselves.
MAX_CLUSTERS = 700
ROUNDS = 6
# A round must gain this fraction of the total to be followed by another.
LEAST_GAIN = 2e-4
CUTS = 8


def to_shapes(found: Shapes) -> list[ForwardShape]:
    """Rows as forward shapes."""
    return [ForwardShape.of(bool(causal), *sizes) for causal, *sizes in found.tolist()]


class Split(NamedTuple):
    """The best cut of a cluster in two: what it saves, and the members of one side."""

    gain: float
    side: Indices


class Search:
    """Covers of weighted points by shapes: clusters, whose shape is the join (largest size in each dimension).

    Args:
        points: [n, d] observed shapes, d = 4 to 6 (see `Shapes`). counts: [n].
        fixed: [f, d] shapes that are there anyway and do not count; one of them dominates every point.
    """

    def __init__(self, points: Shapes, counts: NDArray[np.int64] | Floats, cost: Cost, fixed: Shapes) -> None:
        self.points = points
        self.counts = counts.astype(np.float64)
        self.cost = cost
        self.fixed = fixed

    def run(self, k: int, report: Report = lambda done: None) -> Shapes:
        """[<= k, d] shapes, without the fixed ones: split, merge, then exchange shapes for better ones in rounds."""
        if k < 1:
            return self.points[:0]
        joins, weights = self.clusters(max(MAX_CLUSTERS, OVERSPLIT * k))
        report(0.2)
        coarse, tree, _ = self.merge(self.split(OVERSPLIT * k), k)
        shapes, total = self.settle(coarse)
        for round_ in range(ROUNDS):
            report(0.2 + 0.8 * round_ / ROUNDS)
            candidates = np.unique(np.concatenate([self.neighbours(shapes), tree]), axis=0)
            better, reached = self.settle(self.exchanged(shapes, candidates, joins, weights))
            if reached >= total * (1.0 - LEAST_GAIN):
                break
            shapes, total = better, reached
        report(1.0)
        return shapes

    def clusters(self, k: int) -> tuple[Shapes, Floats]:
        """(joins, weights) of k clusters of points, or of as many as there are points."""
        found = self.split(min(len(self.points), k))
        joins = np.array([self.points[members].max(axis=0) for members in found])
        return joins, np.array([self.counts[members].sum() for members in found])

    def split(self, k: int) -> list[Indices]:
        """k clusters: from one of all points, always the cut that saves most."""
        clusters = [np.arange(len(self.points))]
        splits = [self.best_split(clusters[0])]
        while len(clusters) < k:
            best = int(np.argmax([split.gain for split in splits]))
            if splits[best].gain <= 0:
                break
            side = splits[best].side
            rest = np.setdiff1d(clusters[best], side, assume_unique=True)
            clusters[best], splits[best] = side, self.best_split(side)
            clusters.append(rest)
            splits.append(self.best_split(rest))
        return clusters

    def best_split(self, members: Indices) -> Split:
        """Cuts along each dimension and along cost, at every place."""
        if len(members) < 2:
            return Split(0.0, members[:0])
        points, counts = self.points[members], self.counts[members]
        whole = float(self._seconds(points.max(axis=0)) * counts.sum())
        best = Split(0.0, members[:0])
        for keys in (*points.T, self._seconds(points)):
            order = np.argsort(keys, kind="stable")
            below = np.maximum.accumulate(points[order])[:-1]
            above = np.maximum.accumulate(points[order[::-1]])[::-1][1:]
            weight = np.cumsum(counts[order])
            parts = self._seconds(below) * weight[:-1] + self._seconds(above) * (weight[-1] - weight[:-1])
            cut = int(np.argmin(parts))
            if whole - parts[cut] > best.gain:
                best = Split(whole - float(parts[cut]), np.sort(members[order[: cut + 1]]))
        return best

    def marginal(self, k: int) -> Floats:
        """[k] about what is saved by having one shape more than 1, 2, .. k shapes."""
        _, _, penalties = self.merge(self.split(2 * k), 1)
        return np.concatenate([penalties[::-1], np.zeros(k)])[:k]

    def merge(self, clusters: list[Indices], k: int) -> tuple[Shapes, Shapes, Floats]:
        """[<= k, d] joins, always of the two clusters whose join costs least; every join on the way, and its price."""
        shapes = np.array([self.points[members].max(axis=0) for members in clusters])
        weights = np.array([self.counts[members].sum() for members in clusters])
        penalty = self._penalties(shapes, weights, shapes, weights)
        np.fill_diagonal(penalty, np.inf)
        tree, prices = list(shapes.copy()), []
        for _ in range(len(shapes) - k):
            i, j = divmod(int(np.argmin(penalty)), len(shapes))
            prices.append(penalty[i, j])
            shapes[i], weights[i] = np.maximum(shapes[i], shapes[j]), weights[i] + weights[j]
            weights[j] = 0.0
            penalty[j, :] = penalty[:, j] = np.inf
            row = self._penalties(shapes[i : i + 1], weights[i : i + 1], shapes, weights)[0]
            row[weights == 0.0] = np.inf
            row[i] = np.inf
            penalty[i, :] = penalty[:, i] = row
            tree.append(shapes[i].copy())
        return shapes[weights > 0], np.array(tree), np.array(prices)

    def settle(self, shapes: Shapes) -> tuple[Shapes, float]:
        """Points to their cheapest shapes, shapes to the join of their points, until nothing changes."""
        while True:
            ordered, is_fixed = self._ordered(shapes)
            found = cheapest_fit(ordered, self.points)
            joins = np.zeros_like(ordered)
            np.maximum.at(joins, found, self.points)
            settled = np.unique(joins[~is_fixed & (np.bincount(found, minlength=len(ordered)) > 0)], axis=0)
            if np.array_equal(settled, shapes):
                return settled, float(self._seconds(ordered)[found] @ self.counts)
            shapes = settled

    def exchanged(self, shapes: Shapes, candidates: Shapes, joins: Shapes, weights: Floats) -> Shapes:
        """`shapes` after exchanges for `candidates`, as long as one lowers the cost of weighted clusters of points."""
        table = np.concatenate([shapes, candidates, self.fixed])
        prices = price_table(table, self._seconds(table), joins)
        prices[-1] = prices[-len(self.fixed) :].min(axis=0)
        chosen = exchange(prices, weights, np.arange(len(shapes)))
        return table[chosen]

    def neighbours(self, shapes: Shapes) -> Shapes:
        """Shapes near those chosen: what a cut of a cluster along one dimension leaves, and joins of two."""
        ordered, _ = self._ordered(shapes)
        found = cheapest_fit(ordered, self.points)
        near = [np.maximum(shapes[:, None], shapes[None]).reshape(-1, shapes.shape[1])]
        for index in range(len(ordered)):
            points = self.points[found == index]
            if len(points) < 2:
                continue
            cuts = np.unique(np.linspace(0, len(points) - 1, CUTS + 1).astype(np.int64))
            for keys in (*points.T, self._seconds(points)):
                order = np.argsort(keys, kind="stable")
                near.append(np.maximum.accumulate(points[order])[cuts])
                near.append(np.maximum.accumulate(points[order[::-1]])[cuts])
        return np.concatenate(near)

    def _ordered(self, shapes: Shapes) -> tuple[Shapes, NDArray[np.bool_]]:
        """Shapes and fixed ones in ascending cost, and which are fixed."""
        everything = np.concatenate([shapes, self.fixed])
        order = np.lexsort((everything.sum(axis=1), self._seconds(everything)))
        return everything[order], order >= len(shapes)

    def _penalties(self, a: Shapes, a_weights: Floats, b: Shapes, b_weights: Floats) -> Floats:
        """[len(a), len(b)] what joining costs."""
        joins = self._seconds(np.maximum(a[:, None], b[None]))
        apart = (self._seconds(a) * a_weights)[:, None] + (self._seconds(b) * b_weights)[None]
        return joins * (a_weights[:, None] + b_weights[None]) - apart

    def _seconds(self, shapes: Shapes) -> Floats:
        return shape_seconds(self.cost, shapes)
