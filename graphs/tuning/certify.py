"""Says how far from the optimum buckets can be at most, and makes them better with what it finds on the way."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.steps import Shapes, graph_array
from vllm_gaudi_ucm.graphs.tuning.bids import Ascent, Bids, first_bids
from vllm_gaudi_ucm.graphs.tuning.ceiling import Ceiling, CeilingSearch
from vllm_gaudi_ucm.graphs.tuning.objective import Objective
from vllm_gaudi_ucm.graphs.tuning.rows import least_rows_seconds
from vllm_gaudi_ucm.graphs.tuning.search import Report, Search, to_shapes
from vllm_gaudi_ucm.graphs.tuning.surplus import surpluses

# Rounds end when the gap is no more than this, or after so many: a round of 10,000 steps takes 2 to 5 seconds.
GOOD_GAP = 0.025
MAX_ROUNDS = 6
# Candidates that go from a round to the next, and as many that the ceiling adds.
MAX_CANDIDATES = 600
FIRST_CANDIDATES = 1200
# Rounds look at no more shapes than this. Sizes of a larger log are rounded down for the bound, which the gap includes,
# and its buckets stay what they were.
MAX_SHAPES = 20_000
SWEEPS = 8
# How far above the fee the ceiling may stay, by round: it costs less to look closely once the bids are good.
TOLERANCES = (0.2, 0.15, 0.1)


class Certified(NamedTuple):
    """Buckets, what they cost the objective, and what no set of as many graphs undercuts; seconds."""

    buckets: BucketSet
    seconds: float
    bound: float
    true_seconds: float

    @property
    def gap(self) -> float:
        """The buckets cost at most this share more than the best possible ones."""
        return self.seconds / self.bound - 1.0


def certify(
    objective: Objective,
    buckets: BucketSet,
    max_graphs: int,
    gap: float = GOOD_GAP,
    report: Report = lambda done: None,
) -> Certified:
    """Buckets at least as good as `buckets`, and a lower bound of what `max_graphs` graphs can cost the objective.

    Args:
        objective: what `buckets` were tuned to.
        gap: rounds end once it is reached; if it is not, the gap is what the last one led to.
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
    """Rounds of: climb the dual over some candidates, find shapes that earn too much, exchange buckets for them."""

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
        """Where the rounds have come to."""
        return Certified(self._buckets, self._seconds, self._bound, self._objective.true_seconds)

    def next(self) -> None:
        """One more round: a better bound, better buckets, or both."""
        if not self._number:
            self._begin()
        tolerance = TOLERANCES[min(self._number, len(TOLERANCES) - 1)]
        self._number += 1
        bids = Ascent(self._coarse, self._candidates, self._k, self._most).run(self._bids, SWEEPS)
        fee = float(surpluses(self._coarse, bids.seconds, self._candidates).max(initial=0.0))
        ceiling = CeilingSearch(self._coarse, bids.seconds, fee, tolerance).run()
        self._bound = max(self._bound, self._bound_of(bids.seconds, ceiling.most))
        best = self._candidates[np.argsort(-bids.shares, kind="stable")[:MAX_CANDIDATES]]
        self._exchange(best)
        self._carry_over(bids, best, ceiling)

    def _begin(self) -> None:
        seconds, self._most = first_bids(self._coarse, self._chosen)
        near = np.unique(np.concatenate([self._search.neighbours(self._chosen), self._chosen]), axis=0)
        order = np.argsort(-surpluses(self._coarse, seconds, near), kind="stable")
        self._candidates = near[order[:FIRST_CANDIDATES]]
        self._bids = Bids(seconds, np.full(len(self._candidates), 1.0 / max(1, len(self._candidates))))

    def _carry_over(self, bids: Bids, best: Shapes, ceiling: Ceiling) -> None:
        """The candidates of the next round with their shares: the best so far, those that earn too much, the chosen."""
        new = ceiling.shapes[np.argsort(-ceiling.surplus, kind="stable")[:MAX_CANDIDATES]]
        shares = dict(zip(map(tuple, self._candidates.tolist()), bids.shares.tolist(), strict=True))
        self._candidates = np.unique(np.concatenate([best, new, self._chosen]), axis=0)
        old = np.array([shares.get(tuple(shape), 0.0) for shape in self._candidates.tolist()])
        self._bids = Bids(bids.seconds, 0.98 * old / max(old.sum(), 1e-300) + 0.02 / max(1, len(old)))

    def _exchange(self, candidates: Shapes) -> None:
        """Keeps the buckets that exchanging chosen shapes for candidates leads to, if they cost less."""
        if not len(self._chosen) or self._coarse is not self._objective:
            return
        objective = self._objective
        shapes = self._search.exchanged(self._chosen, self._k, candidates, objective.shapes, objective.weights)
        shapes, _ = self._search.settle(shapes)
        buckets = BucketSet(to_shapes(shapes), self._buckets.logits, self._buckets.limits, self._objective.cost)
        seconds = self._objective.padded_seconds(buckets)
        if seconds < self._seconds:
            self._buckets, self._seconds, self._chosen = buckets, seconds, shapes

    def _bound_of(self, bids: Floats, most: float) -> float:
        """For every division of the graphs between forward shapes and logits rows; the least of them."""
        forward = float(bids @ self._coarse.weights)
        others = np.arange(len(self._rows))[::-1]
        return float((forward - others * most + self._rows).min())
