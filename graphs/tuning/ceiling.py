"""The highest surplus of any shape at all, between two figures: branch and bound over boxes of shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats
from vllm_gaudi_ucm.graphs.shapes.steps import Shapes, shape_seconds
from vllm_gaudi_ucm.graphs.tuning.objective import Objective
from vllm_gaudi_ucm.graphs.tuning.surplus import surpluses

Indices = NDArray[np.int64]

CHUNK = 64
MAX_BOXES = 150_000


class Ceiling(NamedTuple):
    """most: no shape earns more. shapes: [found, d] ones that earn more than the fee. surplus: [found] theirs."""

    most: float
    shapes: Shapes
    surplus: Floats


class Boxes(NamedTuple):
    """Sets of shapes: every shape from the lowest to the highest of a box, as indices of the sizes on each axis."""

    low: Indices
    high: Indices

    def take(self, which: NDArray[Any]) -> Boxes:
        return Boxes(self.low[which], self.high[which])


class CeilingSearch:
    """Boxes that may hold a shape with a surplus above the fee, cut in two until none is left.

    Only joins of steps need to be looked at (another shape costs no less than the join of its steps), so the sizes
    on each axis are those of steps. In a box a step pays at least what the join of the box's lowest shape and the step
    costs; the sum over steps is at least the surplus of any shape in it.

    Args:
        bids: [n] for each of the objective's shapes.
        fee: a surplus that is known to be reached.
        tolerance: boxes that can exceed the fee by no more than this share are not looked into.
    """

    def __init__(self, objective: Objective, bids: Floats, fee: float, tolerance: float) -> None:
        self._objective, self._bids, self._fee, self._tolerance = objective, bids, fee, tolerance
        self._axes = [np.unique(objective.shapes[:, axis]) for axis in range(objective.shapes.shape[1])]
        self._places = np.stack(
            [np.searchsorted(sizes, objective.shapes[:, axis]) for axis, sizes in enumerate(self._axes)], axis=1
        )
        self._shapes: list[Shapes] = []
        self._surplus: list[Floats] = []

    def run(self) -> Ceiling:
        """The ceiling; it is loose where the count of boxes was not enough."""
        boxes = Boxes(np.zeros((1, len(self._axes)), np.int64), np.array([[len(sizes) - 1 for sizes in self._axes]]))
        seen, highest, most = 0, self._fee, 0.0
        while len(boxes.low):
            seen += len(boxes.low)
            limits, boxes = self._limits(boxes)
            highest = max(highest, self._look_at(boxes.take(limits > self._allowed(highest))))
            is_open = limits > self._allowed(highest)
            # A box of one shape is no estimate: its limit is the surplus.
            is_open &= (boxes.low < boxes.high).any(axis=1) & (seen < MAX_BOXES)
            most = max(most, float(limits[~is_open].max(initial=0.0)))
            boxes = self._halves(boxes.take(is_open))
        shapes = np.concatenate([self._objective.shapes[:0], *self._shapes])
        shapes, first = np.unique(shapes, axis=0, return_index=True)
        return Ceiling(max(most, highest), shapes, np.concatenate([np.zeros(0), *self._surplus])[first])

    def _allowed(self, highest: float) -> float:
        return highest * (1.0 + self._tolerance)

    def _limits(self, boxes: Boxes) -> tuple[Floats, Boxes]:
        """(no shape of a box earns more, the boxes in ascending cost without their useless upper parts)."""
        lowest = self._seconds(boxes.low)
        order = np.argsort(lowest, kind="stable")
        boxes, lowest = boxes.take(order), lowest[order]
        limits, high = np.zeros(len(order)), boxes.low.copy()
        for start in range(0, len(order), CHUNK):
            chunk = slice(start, start + CHUNK)
            low, top = boxes.low[chunk], boxes.high[chunk]
            steps = np.flatnonzero((self._bids > lowest[start]) & (self._places <= top.max(axis=0)).all(axis=1))
            fits = np.ones((len(low), len(steps)), bool)
            for axis in range(len(self._axes)):
                fits &= self._places[None, steps, axis] <= top[:, axis, None]
            box, place = np.nonzero(fits)
            joins = np.maximum(low[box], self._places[steps[place]])
            gain = np.clip(self._bids[steps[place]] - self._seconds(joins), 0.0, None)
            limits[chunk] = np.bincount(box, gain * self._objective.weights[steps[place]], len(low))
            paid = np.flatnonzero(gain > 0.0)
            some, first = np.unique(box[paid], return_index=True)
            if some.size:
                high[start + some] = np.maximum.reduceat(joins[paid], first, axis=0)
        return limits, Boxes(boxes.low, high)

    def _look_at(self, boxes: Boxes) -> float:
        """The highest surplus among the highest shapes of boxes; those above the fee are remembered."""
        shapes = self._sizes(boxes.high)
        surplus = surpluses(self._objective, self._bids, shapes)
        better = surplus > self._fee
        self._shapes.append(shapes[better])
        self._surplus.append(surplus[better])
        return float(surplus.max(initial=0.0))

    def _halves(self, boxes: Boxes) -> Boxes:
        """Each box cut in two on the axis along which its cost grows most."""
        rows = np.arange(len(boxes.low))
        growth = np.full((len(rows), len(self._axes)), -1.0)
        highest = self._seconds(boxes.high)
        for axis in range(len(self._axes)):
            lower = boxes.high.copy()
            lower[:, axis] = boxes.low[:, axis]
            width = boxes.high[:, axis] - boxes.low[:, axis]
            # Where cost does not grow, the wider axis is cut; an axis without width never is.
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
