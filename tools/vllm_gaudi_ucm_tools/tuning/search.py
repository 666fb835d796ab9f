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

MAX_EXCHANGES = 200
# An exchange must gain this fraction of the total, so that rounding never causes an endless loop.
LEAST_SWAP_GAIN = 1e-6


def exchange(costs: Floats, weights: Floats, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the candidates that replace `chosen` once no exchange of one for another lowers the weighted cost.

    Args:
        costs: [candidates, points] cost of a point in a candidate; infinite if it does not fit. The last candidate fits
            every point and is always available.
        weights: [points].
        chosen: [k] candidates to start from.
    """
    chosen = chosen.copy()
    owned, sums = _owned(costs, chosen), _Sums(costs, weights, len(chosen))
    sums.add(np.arange(len(weights)), owned, 1.0)
    for _ in range(MAX_EXCHANGES):
        net = sums.gain[:, None] - sums.loss
        candidate, place = divmod(int(np.argmax(net)), len(chosen))
        if net[candidate, place] <= LEAST_SWAP_GAIN * float(owned.first @ weights):
            break
        chosen[place] = candidate
        before, owned = owned, _owned(costs, chosen)
        # an exchange affects few points
        points = np.flatnonzero(owned.differs_from(before))
        sums.add(points, before, -1.0)
        sums.add(points, owned, 1.0)
    return chosen


class _Owned(NamedTuple):
    """The place of each point's cheapest candidate (k: the one that is always available), the cost in it, and the cost
    in the second cheapest; each [points].
    """

    place: NDArray[np.int64]
    first: Floats
    second: Floats

    def differs_from(self, other: _Owned) -> NDArray[np.bool_]:
        """Returns [points] whether any of the three values differs."""
        return (self.place != other.place) | (self.first != other.first) | (self.second != other.second)


def _owned(costs: Floats, chosen: NDArray[np.int64]) -> _Owned:
    mine = np.concatenate([costs[chosen], costs[-1:]])
    place = np.argmin(mine, axis=0)
    columns = np.arange(mine.shape[1])
    first = mine[place, columns]
    mine[place, columns] = np.inf
    return _Owned(place, first, np.minimum(mine.min(axis=0), costs[-1]))


class _Sums:
    """The changes by exchanges, as sums over points.

    gain: [candidates] saved by adding a candidate to all that are chosen. loss: [candidates, k] how much more the
    points of a place cost when the candidate takes it.
    """

    def __init__(self, costs: Floats, weights: Floats, k: int) -> None:
        self._costs, self._weights = costs, weights
        self.gain, self.loss = np.zeros(len(costs)), np.zeros((len(costs), k))

    def add(self, points: NDArray[np.int64], owned: _Owned, sign: float) -> None:
        """Adds these points, or removes them with `sign` -1."""
        places = owned.place[points]
        for place in np.unique(places):
            members = points[places == place]
            costs, first, weights = self._costs[:, members], owned.first[members], sign * self._weights[members]
            self.gain += np.maximum(first - costs, 0.0) @ weights
            if place < self.loss.shape[1]:
                self.loss[:, place] += (np.clip(costs, first, owned.second[members]) - first) @ weights


def cost_table(candidates: Shapes, seconds: Floats, points: Shapes) -> Floats:
    """Returns [candidates, points] seconds of a candidate if it dominates the point, infinite otherwise."""
    fits = np.ones((len(candidates), len(points)), bool)
    for axis in range(points.shape[1]):
        fits &= candidates[:, axis, None] >= points[None, :, axis]
    return np.where(fits, seconds[:, None], np.inf)


Indices = NDArray[np.int64]
Report = Callable[[float], None]
"""Called with the fraction that is done."""

# The clusters that splitting makes for each wanted one, before merging begins.
OVERSPLIT = 6
# Exchanges look at this many clusters instead of every point; the result is settled on the points themselves.
MAX_CLUSTERS = 700
ROUNDS = 6
# Up to this many shapes the search starts from several sides: each shape matters, and exchanges are quick.
FEW = 16
# A round must gain this fraction of the total to be followed by another.
LEAST_GAIN = 2e-4
CUTS = 8
# Clusters of up to this many shapes are cut in all orders at once.
SMALL_CLUSTER = 1000
# The number of candidates that are joins of a chosen shape and one cluster.
WIDENED = 1024


def to_shapes(found: Shapes) -> list[ForwardShape]:
    """Returns rows as forward shapes."""
    return [ForwardShape.from_sizes(bool(causal), *sizes) for causal, *sizes in found.tolist()]


class Split(NamedTuple):
    """The best cut of a cluster in two: the seconds saved, and the members of one side."""

    gain: float
    side: Indices


class Merged(NamedTuple):
    """shapes: [<= k, d] joins that are left. tree: [m, d] every join made. increases: seconds that each join added."""

    shapes: Shapes
    tree: Shapes
    increases: Floats


class Search:
    """Covers weighted points by shapes: clusters, whose shape is the join (largest size in each dimension).

    Args:
        points: [n, d] observed shapes, d = 4 to 6 (see `Shapes`). counts: [n].
        fixed: [f, d] shapes that exist anyway and do not count; one of them dominates every point.
    """

    def __init__(self, points: Shapes, counts: NDArray[np.int64] | Floats, cost: Cost, fixed: Shapes) -> None:
        self.points = points
        self.counts = counts.astype(np.float64)
        self.cost = cost
        self.fixed = fixed
        self._splits: dict[bytes, Split] = {}

    def run(self, k: int, report: Report = lambda done: None) -> Shapes:
        """Returns [<= k, d] shapes, without the fixed ones: splits, merges, then exchanges shapes for better ones in
        rounds.
        """
        if k < 1:
            return self.points[:0]
        joins, weights = self.clusters(max(MAX_CLUSTERS, OVERSPLIT * k))
        report(0.2)
        starts, tree = self.starts(k)
        found = []
        for number, start in enumerate(starts):
            found.append(self._improved(start, k, joins, weights, tree))
            report(0.2 + 0.7 * (number + 1) / len(starts))
        report(1.0)
        return min(found, key=lambda shapes: shapes[1])[0]

    def _improved(self, start: Shapes, k: int, joins: Shapes, weights: Floats, tree: Shapes) -> tuple[Shapes, float]:
        shapes, total = self.settle(start)
        for _ in range(ROUNDS):
            near = [self.neighbours(shapes), self.widened(shapes, joins, weights), tree]
            candidates = np.unique(np.concatenate(near), axis=0)
            better, reached = self.settle(self.exchanged(shapes, k, candidates, joins, weights))
            if reached >= total * (1.0 - LEAST_GAIN):
                break
            shapes, total = better, reached
        return shapes, total

    def clusters(self, k: int) -> tuple[Shapes, Floats]:
        """Returns (joins, weights) of k clusters of points, or of one for each point if there are fewer."""
        return self._joins(self.split(min(len(self.points), k)))

    def split(self, k: int) -> list[Indices]:
        """Makes k clusters: starts with one of all points, and always makes the cut that saves most."""
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
        """Tries cuts along each dimension and along cost, at every place; cached, because the same clusters recur for
        every k.
        """
        key = members.tobytes()
        if key not in self._splits:
            self._splits[key] = self._find_split(members)
        return self._splits[key]

    def _find_split(self, members: Indices) -> Split:
        best = Split(0.0, members[:0])
        if len(members) < 2:
            return best
        points, counts = self.points[members], self.counts[members]
        whole = float(self._seconds(points.max(axis=0)) * counts.sum())
        orders = np.argsort(np.column_stack([points, self._seconds(points)]), axis=0, kind="stable").T
        # small clusters in all orders at once, because the calls dominate their cost
        for some in orders[None] if len(members) <= SMALL_CLUSTER else orders[:, None]:
            ordered = points[some]
            below = np.maximum.accumulate(ordered, axis=1)[:, :-1]
            above = np.maximum.accumulate(ordered[:, ::-1], axis=1)[:, ::-1][:, 1:]
            weight = np.cumsum(counts[some], axis=1)
            first, second = self._seconds(np.stack([below, above]))
            parts = first * weight[:, :-1] + second * (weight[:, -1:] - weight[:, :-1])
            cuts = parts.argmin(axis=1)
            gains = whole - parts[np.arange(len(some)), cuts]
            order = int(gains.argmax())
            if gains[order] > best.gain:
                best = Split(float(gains[order]), np.sort(members[some[order, : cuts[order] + 1]]))
        return best

    def totals(self, k: int) -> Floats:
        """Returns [k + 1] approximate cost of the points with 0, 1, .. k shapes in addition to the fixed ones."""
        merged = self.merge(*self._with_fixed(*self._joins(self.split(2 * k))), 1)
        saved = np.concatenate([[0.0], np.cumsum(merged.increases[::-1]), np.full(k, merged.increases.sum())])[: k + 1]
        return float(self._seconds(self.fixed.max(axis=0)) * self.counts.sum()) - saved

    def starts(self, k: int) -> tuple[list[Shapes], Shapes]:
        """Returns ([<= k, d] shapes to begin with, from different sides; every join that was made on the way)."""
        clusters = self._joins(self.split(OVERSPLIT * k))
        apart = self.merge(*clusters, k)
        if k > FEW:
            return [apart.shapes], apart.tree
        beside = self.merge(*self._with_fixed(*clusters), k + 1)
        # From no shapes, exchanging begins by adding the shape that saves most.
        return [apart.shapes, beside.shapes[1:], self.points[:0]], np.concatenate([apart.tree, beside.tree])

    def merge(self, shapes: Shapes, weights: Floats, k: int) -> Merged:
        """Returns k clusters or fewer, by always joining the two whose join costs least."""
        shapes, weights = shapes.copy(), weights.copy()
        penalty = self._penalties(shapes, weights, shapes, weights)
        np.fill_diagonal(penalty, np.inf)
        left, tree, increases = np.ones(len(shapes), bool), list(shapes.copy()), []
        for _ in range(len(shapes) - k):
            # the first of the two stays, so that the first cluster stays the first
            i, j = divmod(int(np.argmin(penalty)), len(shapes))
            increases.append(penalty[i, j])
            shapes[i], weights[i] = np.maximum(shapes[i], shapes[j]), weights[i] + weights[j]
            left[j] = False
            penalty[j, :] = penalty[:, j] = np.inf
            row = self._penalties(shapes[i : i + 1], weights[i : i + 1], shapes, weights)[0]
            row[~left] = np.inf
            row[i] = np.inf
            penalty[i, :] = penalty[:, i] = row
            tree.append(shapes[i].copy())
        return Merged(shapes[left], np.array(tree), np.array(increases))

    def _joins(self, clusters: list[Indices]) -> tuple[Shapes, Floats]:
        """Returns (shapes, weights) of clusters."""
        shapes = np.array([self.points[members].max(axis=0) for members in clusters])
        return shapes, np.array([self.counts[members].sum() for members in clusters])

    def _with_fixed(self, shapes: Shapes, weights: Floats) -> tuple[Shapes, Floats]:
        """Adds the largest fixed shape as the first cluster, without points so far: clusters that join it need no
        shape.
        """
        return np.concatenate([self.fixed.max(axis=0, keepdims=True), shapes]), np.concatenate([[0.0], weights])

    def settle(self, shapes: Shapes) -> tuple[Shapes, float]:
        """Assigns points to their cheapest shapes, and shapes to the join of their points, until both stay the same."""
        while True:
            ordered, is_fixed = self._ordered(shapes)
            found = cheapest_fit(ordered, self.points)
            joins = np.zeros_like(ordered)
            np.maximum.at(joins, found, self.points)
            settled = np.unique(joins[~is_fixed & (np.bincount(found, minlength=len(ordered)) > 0)], axis=0)
            if np.array_equal(settled, shapes):
                return settled, float(self._seconds(ordered)[found] @ self.counts)
            shapes = settled

    def exchanged(self, shapes: Shapes, k: int, candidates: Shapes, joins: Shapes, weights: Floats) -> Shapes:
        """Returns [k, d] `shapes` after exchanges for `candidates`, as long as one lowers the cost of weighted clusters
        of points.

        If there are fewer than k, a fixed shape fills each free place, and is exchanged like the others.
        """
        table = np.concatenate([shapes, candidates, self.fixed])
        costs = cost_table(table, self._seconds(table), joins)
        costs[-1] = costs[-len(self.fixed) :].min(axis=0)
        places = np.full(k, len(table) - 1)
        places[: len(shapes)] = np.arange(len(shapes))
        chosen = exchange(costs, weights, places)
        return table[chosen]

    def neighbours(self, shapes: Shapes) -> Shapes:
        """Returns shapes near the chosen ones: parts of a cluster that is cut along one dimension, and joins of two."""
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

    def widened(self, shapes: Shapes, joins: Shapes, weights: Floats) -> Shapes:
        """Returns joins of the shapes with the clusters of points that lose most in the present shapes."""
        ordered, _ = self._ordered(shapes)
        loss = (self._seconds(ordered)[cheapest_fit(ordered, joins)] - self._seconds(joins)) * weights
        dearest = joins[np.argsort(-loss, kind="stable")[: max(1, WIDENED // max(1, len(shapes)))]]
        return np.maximum(shapes[:, None], dearest[None]).reshape(-1, shapes.shape[1])

    def _ordered(self, shapes: Shapes) -> tuple[Shapes, NDArray[np.bool_]]:
        """Returns shapes and fixed ones in ascending cost, and which are fixed."""
        everything = np.concatenate([shapes, self.fixed])
        order = np.lexsort((everything.sum(axis=1), self._seconds(everything)))
        return everything[order], order >= len(shapes)

    def _penalties(self, a: Shapes, a_weights: Floats, b: Shapes, b_weights: Floats) -> Floats:
        """Returns [len(a), len(b)], the cost of joining."""
        joins = self._seconds(np.maximum(a[:, None], b[None]))
        apart = (self._seconds(a) * a_weights)[:, None] + (self._seconds(b) * b_weights)[None]
        return joins * (a_weights[:, None] + b_weights[None]) - apart

    def _seconds(self, shapes: Shapes) -> Floats:
        return shape_seconds(self.cost, shapes)
