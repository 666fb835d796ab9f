"""What a shape would earn if each step paid its bid for it: the fee that a graph for the shape is worth."""

from __future__ import annotations

import numpy as np

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats
from vllm_gaudi_ucm.graphs.shapes.steps import Shapes, shape_seconds
from vllm_gaudi_ucm.graphs.tuning.objective import Objective

CHUNK = 256


def surpluses(objective: Objective, bids: Floats, candidates: Shapes) -> Floats:
    """[candidates] sum over the steps that a candidate dominates of weight x (bid - its seconds), where positive.

    Args:
        bids: [n] seconds that each of the objective's shapes would pay at most.
    """
    seconds = shape_seconds(objective.cost, candidates)
    order = np.argsort(seconds, kind="stable")
    found = np.zeros(len(candidates))
    for start in range(0, len(order), CHUNK):
        chunk = order[start : start + CHUNK]
        # Candidates of like seconds have like steps: cheaper than they are, with a bid above.
        end = np.searchsorted(objective.seconds, seconds[chunk[-1]] * (1.0 + 1e-12), side="right")
        steps = np.flatnonzero(bids[:end] > seconds[chunk[0]])
        fits = np.ones((len(chunk), len(steps)), bool)
        for axis in range(candidates.shape[1]):
            fits &= candidates[chunk, axis, None] >= objective.shapes[None, steps, axis]
        gain = np.clip(bids[steps] - seconds[chunk, None], 0.0, None)
        found[chunk] = (gain * fits) @ objective.weights[steps]
    return found
