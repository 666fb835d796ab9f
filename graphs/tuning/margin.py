"""Steps that were not observed but could be: what keeps tuned buckets from failing the day after."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.limits import Limits
from vllm_gaudi_ucm.graphs.steps import Shapes, Steps

# A step a little beyond every bucket that was made for a log falls to the configured maximum, which can cost a hundred
# times as much. Without a margin, buckets tuned on 4,000 steps cost 10 to 46 times too much on the next 4,000.
SPREAD = 0.25
NEAR_POINTS = 1500
FAR_POINTS = 150
FAR_SHARE = 0.02


def with_margin(steps: Steps, limits: Limits, margin: float) -> tuple[Shapes, NDArray[np.float64]]:
    """(shapes, weights): the observed ones, and a share `margin` of the weight on larger ones near them.

    Most of the margin lies on observed shapes whose sizes grew by a random factor (log-normal, about a quarter), a
    fiftieth of it on sizes anywhere between the observed ones and the limits. The same steps give the same margin.
    """
    if margin == 0.0:
        return steps.forward, steps.forward_counts.astype(np.float64)
    rng = np.random.default_rng(0)
    shares = steps.forward_counts / steps.count
    near = steps.forward[rng.choice(len(steps.forward), NEAR_POINTS, p=shares)]
    factors = np.exp(np.abs(rng.normal(0.0, SPREAD, (NEAR_POINTS, 3))))
    near = _resized(near, np.ceil(near[:, 1:] * factors) + 1, limits)
    far = steps.forward[rng.choice(len(steps.forward), FAR_POINTS)]
    reach = _maxima(far, limits) / np.maximum(far[:, 1:], 1)
    far = _resized(far, np.ceil(far[:, 1:] * reach ** rng.random((FAR_POINTS, 3))), limits)
    weight = margin * steps.count
    weights = [
        steps.forward_counts * (1.0 - margin),
        np.full(NEAR_POINTS, weight * (1.0 - FAR_SHARE) / NEAR_POINTS),
        np.full(FAR_POINTS, weight * FAR_SHARE / FAR_POINTS),
    ]
    return np.concatenate([steps.forward, near, far]), np.concatenate(weights)


def logits_with_margin(steps: Steps, limits: Limits, margin: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(rows, weights): the observed rows and the largest; with a margin all rows there can be, in equal parts of it."""
    weights = np.full(limits.max_num_seqs, margin * steps.logits_counts.sum() / limits.max_num_seqs)
    weights[steps.logits - 1] += steps.logits_counts * (1.0 - margin)
    rows = np.flatnonzero(weights)
    rows = np.union1d(rows, [limits.max_num_seqs - 1])
    return rows + 1, weights[rows]


def _resized(shapes: Shapes, sizes: NDArray[np.float64], limits: Limits) -> Shapes:
    """The shapes with other sizes, within the limits; a part that is absent stays absent."""
    resized = shapes.copy()
    resized[:, 1:] = np.where(shapes[:, 1:] > 0, np.minimum(sizes, _maxima(shapes, limits)), 0)
    return resized


def _maxima(shapes: Shapes, limits: Limits) -> NDArray[np.int64]:
    most = limits.maximum
    maxima = np.empty((len(shapes), 3), np.int64)
    maxima[:, 0] = np.where(shapes[:, 0] > 0, most.query_len, limits.max_decode_rows)
    maxima[:, 1:] = most.shared_blocks, most.unique_blocks
    return maxima
