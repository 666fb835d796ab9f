"""Dual prices of steps, climbed until no candidate's reduced profit stands out: the dual of choosing k candidates.

A step with dual price `p` pays at most `p` seconds. The reduced profit of a shape is what its steps would pay beyond
its seconds. If no shape has a reduced profit above `f`, the graph price, no k shapes cost less than `sum(weight * p) -
k * f`. This is the Lagrangian dual of the k-median problem (Cornuejols, Fisher and Nemhauser 1977). It is concave and
kinked, so the climb smooths it: a soft maximum replaces the highest reduced profit, around shares of the candidates
that are themselves improved (an entropic proximal method).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats
from vllm_gaudi_ucm.graphs.shapes.steps import Shapes, shape_seconds
from vllm_gaudi_ucm_tools.tuning.objective import Objective

ITERATIONS = 60
# Width of the soft maximum, as a share of the graph price.
SOFTNESS = 0.05
# First length of a move, as a share of the mean price beyond the true seconds; each sweep has shorter ones.
MOVE = 0.06
SHORTER = 0.8
# No price beyond this factor of a step's present seconds is useful.
MOST_PRICE = 2.5


class DualPrices(NamedTuple):
    """seconds: [n] the most that each step pays. shares: [candidates] of a fractional choice; their sum is 1."""

    seconds: Floats
    shares: Floats


def first_prices(objective: Objective, chosen: Shapes) -> tuple[Floats, Floats]:
    """Returns (prices, most): prices near the best ones if `chosen` is a good choice; and the highest price of each
    step.

    A step pays the cost of its shape and an equal part of the graph price, but never more than its second best choice.
    """
    owner, first, second = objective.two_cheapest(chosen)
    losses = np.bincount(owner, objective.weights * (second - first), len(chosen) + 1)[:-1]
    graph_price = float(np.sort(losses)[: max(1, len(losses) // 10)].mean()) if len(losses) else 0.0
    prices = first.copy()
    for place in range(len(chosen)):
        steps = np.flatnonzero(owner == place)
        prices[steps] += _parts(objective.weights[steps], second[steps] - first[steps], graph_price)
    return prices, np.minimum(second, MOST_PRICE * first)


def _parts(weights: Floats, limits: Floats, graph_price: float) -> Floats:
    """Returns [n] equal parts, none above its limit, whose weighted sum is the graph price, or that of all limits."""
    low, high = 0.0, float(limits.max(initial=0.0))
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if weights @ np.minimum(limits, middle) <= graph_price else (low, middle)
    return np.minimum(limits, low)


class Ascent:
    """Climbs the dual over some candidates.

    Args:
        candidates: [m, d]. k: how many of them may be chosen.
        most: [n] the highest price of each step.
    """

    def __init__(self, objective: Objective, candidates: Shapes, k: int, most: Floats) -> None:
        self._objective, self._k, self._most = objective, k, most
        self._count = len(candidates)
        seconds = shape_seconds(objective.cost, candidates)
        steps = [_steps_of(objective, shape, most > each) for shape, each in zip(candidates, seconds, strict=True)]
        self._step: NDArray[np.int64] = np.concatenate(steps) if steps else np.zeros(0, np.int64)
        self._candidate = np.repeat(np.arange(self._count), [len(each) for each in steps])
        self._seconds = seconds[self._candidate]
        self._weight = objective.weights[self._step]
        self._mean, self._square, self._moves = np.zeros_like(most), np.zeros_like(most), 0

    def value(self, prices: Floats) -> float:
        """Returns the value of the dual: no k of the candidates cost less."""
        return float(self._objective.weights @ prices) - self._k * float(self._profits(prices).max(initial=0.0))

    def find_prices(self, start: DualPrices, sweeps: int) -> DualPrices:
        """Returns better prices and shares, after `sweeps` sweeps of moves."""
        best, best_value = start.seconds, self.value(start.seconds)
        now, shares = start.seconds, start.shares
        objective = self._objective
        unit = objective.seconds * ((now - objective.seconds) @ objective.weights)
        unit = MOVE * unit / (objective.seconds @ objective.weights)
        for _ in range(sweeps):
            now, mean, taken = self._sweep(now, shares, unit)
            for each in (now, mean):
                value = self.value(each)
                if value > best_value:
                    best, best_value = each, value
            shares = np.maximum(0.5 * shares + 0.5 * taken, 1e-6 / max(1, self._count))
            shares /= shares.sum()
            unit = unit * SHORTER
        return DualPrices(best, shares)

    def _sweep(self, prices: Floats, shares: Floats, unit: Floats) -> tuple[Floats, Floats, Floats]:
        """Returns (last prices, mean prices, mean soft choice). Moves follow Adam (Kingma and Ba 2015): similar for all
        steps.
        """
        total, taken = np.zeros_like(prices), np.zeros_like(shares)
        graph_price = float(self._profits(prices).max(initial=0.0))
        for _ in range(ITERATIONS):
            choice, slope = self._slope(prices, shares, graph_price)
            self._moves += 1
            self._mean = 0.9 * self._mean + 0.1 * slope
            self._square = 0.99 * self._square + 0.01 * slope**2
            size = np.sqrt(self._square / (1.0 - 0.99**self._moves)) + 1e-300
            move = self._mean / (1.0 - 0.9**self._moves) / size
            prices = np.clip(prices + unit * move, self._objective.seconds, self._most)
            total += prices
            taken += choice
        return prices, total / ITERATIONS, taken / ITERATIONS

    def _slope(self, prices: Floats, shares: Floats, graph_price: float) -> tuple[Floats, Floats]:
        """Returns (soft choice of the highest reduced profit, slope of the smoothed dual for each price)."""
        gain = prices[self._step] - self._seconds
        paid = gain > 0.0
        profits = np.bincount(self._candidate, np.where(paid, gain, 0.0) * self._weight, self._count)
        highest = profits.max(initial=0.0)
        choice = shares * np.exp((profits - highest) / max(SOFTNESS * graph_price, 1e-300))
        choice /= max(choice.sum(), 1e-300)
        served = np.bincount(self._step, paid * choice[self._candidate], len(prices))
        return choice, self._objective.weights * (1.0 - self._k * served)

    def _profits(self, prices: Floats) -> Floats:
        gain = np.clip(prices[self._step] - self._seconds, 0.0, None)
        return np.bincount(self._candidate, gain * self._weight, self._count).astype(np.float64)


def _steps_of(objective: Objective, candidate: NDArray[np.int64], may_pay: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.flatnonzero(may_pay & (objective.shapes <= candidate).all(axis=1))


CHUNK = 256


def reduced_profits(objective: Objective, prices: Floats, candidates: Shapes) -> Floats:
    """Returns [candidates] sum over the steps that a candidate dominates of weight x (price - its seconds), if
    positive.

    Args:
        prices: [n] dual prices of the objective's shapes, in seconds.
    """
    seconds = shape_seconds(objective.cost, candidates)
    order = np.argsort(seconds, kind="stable")
    found = np.zeros(len(candidates))
    for start in range(0, len(order), CHUNK):
        chunk = order[start : start + CHUNK]
        # Candidates of similar seconds have similar steps: cheaper than the candidates, with a price above.
        end = np.searchsorted(objective.seconds, seconds[chunk[-1]] * (1.0 + 1e-12), side="right")
        steps = np.flatnonzero(prices[:end] > seconds[chunk[0]])
        fits = np.ones((len(chunk), len(steps)), bool)
        for axis in range(candidates.shape[1]):
            fits &= candidates[chunk, axis, None] >= objective.shapes[None, steps, axis]
        gain = np.clip(prices[steps] - seconds[chunk, None], 0.0, None)
        found[chunk] = (gain * fits) @ objective.weights[steps]
    return found
