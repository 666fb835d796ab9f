"""Chooses buckets for observed steps: logits rows exactly, forward shapes by search, within one number of graphs."""

from __future__ import annotations

import numpy as np

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost, Floats
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.steps import Steps, check_steps
from vllm_gaudi_ucm_tools.tuning.logits_rows import best_rows
from vllm_gaudi_ucm_tools.tuning.objective import Objective
from vllm_gaudi_ucm_tools.tuning.search import Report, Search, to_shapes

DEFAULT_MARGIN = 0.05
# The configured maximum, for the forward graph and for the logits.
LEAST_GRAPHS = 2


def tune(
    steps: Steps,
    limits: Limits,
    cost: Cost,
    max_graphs: int,
    margin: float = DEFAULT_MARGIN,
    report: Report = lambda done: None,
) -> BucketSet:
    """Returns at most `max_graphs` graphs that cost `steps` the least.

    Args:
        steps: the observed steps.
        limits: bounds of all steps; the maximum is always one of the graphs.
        margin: share of the weight on steps somewhat larger than the observed ones. 0 fits the log exactly: larger
            steps then run in the maximum.
        report: called with the fraction that is done.
    """
    check_steps(steps, limits)
    if max_graphs < LEAST_GRAPHS:
        raise ValueError(f"max_graphs is {max_graphs}, expected at least {LEAST_GRAPHS}: the configured maximum")
    objective = Objective.of(steps, limits, cost, margin)
    search = Search(objective.shapes, objective.weights, cost, objective.maximum)
    rows = _divide(objective, max_graphs, search)
    found = search.run(max_graphs - len(rows) - 1, report)
    return BucketSet(to_shapes(found), rows, limits, cost)


def _divide(objective: Objective, max_graphs: int, search: Search) -> list[int]:
    """Returns the logits rows. Their number leaves as many graphs for forward shapes as cost the least together with
    them.
    """
    optimum, values = best_rows(objective, max_graphs - 1)
    k = _balance(optimum.total, search.totals(max_graphs - LEAST_GRAPHS))
    return [int(values[index]) for index in optimum.tops(k)]


def _balance(rows: Floats, forward: Floats) -> int:
    """Returns how many logits rows to use: of n + 1 graphs the maximum has one, k are logits rows, the other n - k
    forward shapes.

    Args:
        rows: seconds with 1, 2, .. logits rows, n of them or fewer.
        forward: [n] seconds with 0, 1, .. n - 1 forward shapes in addition to the maximum.
    """
    together = rows + forward[::-1][: len(rows)]
    return int(np.argmin(together)) + 1
