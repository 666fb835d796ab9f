"""Exchanges chosen shapes for better candidates until no single exchange helps (fast interchange, Whitaker 1983)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats
from vllm_gaudi_ucm.graphs.shapes.steps import Shapes

MAX_EXCHANGES = 200
# An exchange must gain this fraction of the total, so that rounding never makes an endless loop.
LEAST_GAIN = 1e-6


def exchange(prices: Floats, weights: Floats, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """The candidates in place of `chosen` once no exchange of one for another lowers the weighted cost.

    Args:
        prices: [candidates, points] cost of a point in a candidate; infinite where it does not fit. The last
            candidate fits every point and is always there.
        weights: [points].
        chosen: [k] candidates to start from.
    """
    chosen = chosen.copy()
    for _ in range(MAX_EXCHANGES):
        owner, first, second = _two_cheapest(prices, chosen)
        gain = np.clip(first - prices, 0.0, None) @ weights
        loss = _losses(prices, weights, owner, first, second, len(chosen))
        net = gain[:, None] - loss
        candidate, place = divmod(int(np.argmax(net)), len(chosen))
        if net[candidate, place] <= LEAST_GAIN * float(first @ weights):
            break
        chosen[place] = candidate
    return chosen


def _two_cheapest(prices: Floats, chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], Floats, Floats]:
    """For each point the place of its cheapest (k: the one that is always there), its cost, and the second's."""
    mine = np.concatenate([prices[chosen], prices[-1:]])
    owner = np.argmin(mine, axis=0)
    columns = np.arange(mine.shape[1])
    first = mine[owner, columns]
    mine[owner, columns] = np.inf
    return owner, first, np.minimum(mine.min(axis=0), prices[-1])


def _losses(prices: Floats, weights: Floats, owner: NDArray[np.int64], first: Floats, second: Floats, k: int) -> Floats:
    """[candidates, k] what it costs that a place's points lose it, when they have the candidate instead."""
    losses = np.zeros((len(prices), k))
    for place in range(k):
        members = np.flatnonzero(owner == place)
        if members.size:
            instead = np.clip(prices[:, members], first[members], second[members])
            losses[:, place] = (instead - first[members]) @ weights[members]
    return losses


def price_table(candidates: Shapes, seconds: Floats, points: Shapes) -> Floats:
    """[candidates, points] seconds of a candidate where it dominates the point, infinite elsewhere."""
    fits = np.ones((len(candidates), len(points)), bool)
    for axis in range(points.shape[1]):
        fits &= candidates[:, axis, None] >= points[None, :, axis]
    return np.where(fits, seconds[:, None], np.inf)
