"""Bounds how far buckets can be from the optimum, by dual prices and by branch and bound over boxes of shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.steps import Shapes, graph_array, shape_seconds
from vllm_gaudi_ucm_tools.buckets.dual_prices import Ascent, DualPrices, first_prices, reduced_profits
from vllm_gaudi_ucm_tools.tuning.logits_rows import least_rows_seconds
from vllm_gaudi_ucm_tools.tuning.objective import Objective
from vllm_gaudi_ucm_tools.tuning.search import Report, Search, to_shapes

Indices = NDArray[np.int64]

CHUNK = 64
MAX_BOXES = 150_000


class Ceiling(NamedTuple):
    """most: the highest possible reduced profit. shapes: [found, d] those above the graph price. profits: [found]
    theirs.
    """

    most: float
    shapes: Shapes
    profits: Floats


class Boxes(NamedTuple):
    """Sets of shapes: every shape from the lowest to the highest of a box, as indices of the sizes on each axis."""

    low: Indices
    high: Indices

    def take(self, which: NDArray[Any]) -> Boxes:
        return Boxes(self.low[which], self.high[which])


class CeilingSearch:
    """Searches for the highest reduced profit of any shape: boxes that may hold one above the graph price are cut in
    two until none is left.

    Only joins of steps must be examined (another shape costs no less than the join of its steps), so the sizes on each
    axis are those of steps. In a box, a step pays at least the cost of its join with the box's lowest shape; the sum
    over steps is at least the reduced profit of any shape in it.

    Args:
        prices: [n] dual prices of the objective's shapes.
        graph_price: a reduced profit that some shape is known to have.
        tolerance: boxes that can exceed the graph price by no more than this share are not examined.
    """

    def __init__(self, objective: Objective, prices: Floats, graph_price: float, tolerance: float) -> None:
        self._objective, self._prices, self._graph_price, self._tolerance = objective, prices, graph_price, tolerance
        self._axes = [np.unique(objective.shapes[:, axis]) for axis in range(objective.shapes.shape[1])]
        self._places = np.stack(
            [np.searchsorted(sizes, objective.shapes[:, axis]) for axis, sizes in enumerate(self._axes)], axis=1
        )
        self._shapes: list[Shapes] = []
        self._profits: list[Floats] = []

    def find_ceiling(self) -> Ceiling:
        """Returns the ceiling, which is loose if the number of boxes was not enough."""
        boxes = Boxes(np.zeros((1, len(self._axes)), np.int64), np.array([[len(sizes) - 1 for sizes in self._axes]]))
        seen, highest, most = 0, self._graph_price, 0.0
        while len(boxes.low):
            seen += len(boxes.low)
            limits, boxes = self._limits(boxes)
            highest = max(highest, self._look_at(boxes.take(limits > self._allowed(highest))))
            is_open = limits > self._allowed(highest)
            # A box of one shape needs no estimate: its limit is the reduced profit.
            is_open &= (boxes.low < boxes.high).any(axis=1) & (seen < MAX_BOXES)
            most = max(most, float(limits[~is_open].max(initial=0.0)))
            boxes = self._halves(boxes.take(is_open))
        shapes = np.concatenate([self._objective.shapes[:0], *self._shapes])
        shapes, first = np.unique(shapes, axis=0, return_index=True)
        return Ceiling(max(most, highest), shapes, np.concatenate([np.zeros(0), *self._profits])[first])

    def _allowed(self, highest: float) -> float:
        return highest * (1.0 + self._tolerance)

    def _limits(self, boxes: Boxes) -> tuple[Floats, Boxes]:
        """Returns (an upper bound of each box's profits, the boxes in ascending cost without their useless upper
        parts).
        """
        lowest = self._seconds(boxes.low)
        order = np.argsort(lowest, kind="stable")
        boxes, lowest = boxes.take(order), lowest[order]
        limits, high = np.zeros(len(order)), boxes.low.copy()
        for start in range(0, len(order), CHUNK):
            chunk = slice(start, start + CHUNK)
            low, top = boxes.low[chunk], boxes.high[chunk]
            steps = np.flatnonzero((self._prices > lowest[start]) & (self._places <= top.max(axis=0)).all(axis=1))
            fits = np.ones((len(low), len(steps)), bool)
            for axis in range(len(self._axes)):
                fits &= self._places[None, steps, axis] <= top[:, axis, None]
            box, place = np.nonzero(fits)
            joins = np.maximum(low[box], self._places[steps[place]])
            gain = np.clip(self._prices[steps[place]] - self._seconds(joins), 0.0, None)
            limits[chunk] = np.bincount(box, gain * self._objective.weights[steps[place]], len(low))
            paid = np.flatnonzero(gain > 0.0)
            some, first = np.unique(box[paid], return_index=True)
            if some.size:
                high[start + some] = np.maximum.reduceat(joins[paid], first, axis=0)
        return limits, Boxes(boxes.low, high)

    def _look_at(self, boxes: Boxes) -> float:
        """Returns the highest reduced profit among the highest shapes of boxes; keeps those above the graph price."""
        shapes = self._sizes(boxes.high)
        profits = reduced_profits(self._objective, self._prices, shapes)
        better = profits > self._graph_price
        self._shapes.append(shapes[better])
        self._profits.append(profits[better])
        return float(profits.max(initial=0.0))

    def _halves(self, boxes: Boxes) -> Boxes:
        """Cuts each box in two on the axis along which its cost grows most."""
        rows = np.arange(len(boxes.low))
        growth = np.full((len(rows), len(self._axes)), -1.0)
        highest = self._seconds(boxes.high)
        for axis in range(len(self._axes)):
            lower = boxes.high.copy()
            lower[:, axis] = boxes.low[:, axis]
            width = boxes.high[:, axis] - boxes.low[:, axis]
            # If cost does not grow, the wider axis is cut; an axis without width never is.
            grown = highest - self._seconds(lower) + 1e-12 * width
            growth[:, axis] = np.where(width > 0, grown, -1.0)
        axis = growth.argmax(axis=1)
        middle = (boxes.low[rows, axis] + boxes.high[rows, axis]) // 2
        high, low = boxes.high.copy(), boxes.low.copy()
        high[rows, axis], low[rows, axis] = middle, middle + 1
        return Boxes(np.concatenate([boxes.low, low]), np.concatenate([high, boxes.high]))

    def _sizes(self, places: Indices) -> Shapes:
        return np.stack([sizes[places[:, axis]] for axis, sizes in enumerate(self._axes)], axis=1)

    def _seconds(self, places: Indices) -> Floats:
        return shape_seconds(self._objective.cost, self._sizes(places))


# Rounds end at this gap, or at this number: a round of 10,000 steps takes 2 to 5 seconds.
GOOD_GAP = 0.025
MAX_ROUNDS = 6
# The number of candidates that one round passes to the next, and the most that the ceiling adds to them.
MAX_CANDIDATES = 600
FIRST_CANDIDATES = 1200
# Rounds examine no more shapes than this. For a larger log, sizes are rounded down for the bound, which the gap
# includes, and the buckets stay the same.
MAX_SHAPES = 20_000
SWEEPS = 8
# How far above the graph price the ceiling may stay, by round: a close search costs less once the prices are good.
TOLERANCES = (0.2, 0.15, 0.1)


class Certified(NamedTuple):
    """Buckets, their cost for the objective, and a lower bound for any set of as many graphs; seconds."""

    buckets: BucketSet
    seconds: float
    bound: float
    true_seconds: float

    @property
    def gap(self) -> float:
        """Returns the share by which the buckets cost at most more than the best possible ones."""
        return self.seconds / self.bound - 1.0


def certify(
    objective: Objective,
    buckets: BucketSet,
    max_graphs: int,
    gap: float = GOOD_GAP,
    report: Report = lambda done: None,
) -> Certified:
    """Returns buckets at least as good as `buckets`, and a lower bound for the cost of `max_graphs` graphs.

    Args:
        objective: the objective to which `buckets` were tuned.
        gap: rounds end once it is reached, or after MAX_ROUNDS.
        report: called with the fraction of the rounds that is done.
    """
    rounds = _Rounds(objective, buckets, max_graphs)
    for number in range(MAX_ROUNDS):
        if rounds.now().gap <= gap:
            break
        report(number / MAX_ROUNDS)
        rounds.next()
    report(1.0)
    return rounds.now()


class _Rounds:
    """Climbs, in each round, the dual over candidates, finds shapes above the graph price, and exchanges buckets for
    them.
    """

    def __init__(self, objective: Objective, buckets: BucketSet, max_graphs: int) -> None:
        self._objective, self._coarse = objective, objective.coarse(MAX_SHAPES)
        self._buckets = buckets
        self._graphs, self._k = max_graphs, max_graphs - len(buckets.logits) - 1
        self._rows = least_rows_seconds(objective, max_graphs - 1)
        coarse = self._coarse
        self._search = Search(coarse.shapes, coarse.weights, coarse.cost, coarse.maximum)
        chosen = graph_array(buckets.forward)[:, : objective.shapes.shape[1]]
        self._chosen, _ = self._search.settle(chosen[(chosen != objective.maximum).any(axis=1)])
        self._seconds = objective.padded_seconds(buckets)
        self._bound = self._bound_of(self._coarse.seconds, 0.0)
        self._number = 0

    def now(self) -> Certified:
        """Returns the result so far."""
        return Certified(self._buckets, self._seconds, self._bound, self._objective.true_seconds)

    def next(self) -> None:
        """Runs one more round: a better bound, better buckets, or both."""
        if not self._number:
            self._begin()
        tolerance = TOLERANCES[min(self._number, len(TOLERANCES) - 1)]
        self._number += 1
        prices = Ascent(self._coarse, self._candidates, self._k, self._most).find_prices(self._prices, SWEEPS)
        graph_price = float(reduced_profits(self._coarse, prices.seconds, self._candidates).max(initial=0.0))
        ceiling = CeilingSearch(self._coarse, prices.seconds, graph_price, tolerance).find_ceiling()
        self._bound = max(self._bound, self._bound_of(prices.seconds, ceiling.most))
        best = self._candidates[np.argsort(-prices.shares, kind="stable")[:MAX_CANDIDATES]]
        self._exchange(best)
        self._carry_over(prices, best, ceiling)

    def _begin(self) -> None:
        seconds, self._most = first_prices(self._coarse, self._chosen)
        near = np.unique(np.concatenate([self._search.neighbours(self._chosen), self._chosen]), axis=0)
        order = np.argsort(-reduced_profits(self._coarse, seconds, near), kind="stable")
        self._candidates = near[order[:FIRST_CANDIDATES]]
        self._prices = DualPrices(seconds, np.full(len(self._candidates), 1.0 / max(1, len(self._candidates))))

    def _carry_over(self, prices: DualPrices, best: Shapes, ceiling: Ceiling) -> None:
        """Sets the next candidates with their shares: the best so far, those above the graph price, the chosen ones."""
        new = ceiling.shapes[np.argsort(-ceiling.profits, kind="stable")[:MAX_CANDIDATES]]
        shares = dict(zip(map(tuple, self._candidates.tolist()), prices.shares.tolist(), strict=True))
        self._candidates = np.unique(np.concatenate([best, new, self._chosen]), axis=0)
        old = np.array([shares.get(tuple(shape), 0.0) for shape in self._candidates.tolist()])
        self._prices = DualPrices(prices.seconds, 0.98 * old / max(old.sum(), 1e-300) + 0.02 / max(1, len(old)))

    def _exchange(self, candidates: Shapes) -> None:
        """Keeps the buckets that result from exchanging chosen shapes for candidates, if they cost less."""
        if not len(self._chosen) or self._coarse is not self._objective:
            return
        objective = self._objective
        shapes = self._search.exchanged(self._chosen, self._k, candidates, objective.shapes, objective.weights)
        shapes, _ = self._search.settle(shapes)
        buckets = BucketSet(to_shapes(shapes), self._buckets.logits, self._buckets.limits, self._objective.cost)
        seconds = self._objective.padded_seconds(buckets)
        if seconds < self._seconds:
            self._buckets, self._seconds, self._chosen = buckets, seconds, shapes

    def _bound_of(self, prices: Floats, most: float) -> float:
        """Returns the least bound over all divisions of the graphs between forward shapes and logits rows."""
        forward = float(prices @ self._coarse.weights)
        others = np.arange(len(self._rows))[::-1]
        return float((forward - others * most + self._rows).min())
