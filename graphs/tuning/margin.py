"""Steps that were not observed but could be: what keeps tuned buckets from failing the day after."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import flat_tiles
from vllm_gaudi_ucm.graphs.shapes.steps import Shapes, Steps

# A step a little beyond every bucket that was made for a log falls to the configured maximum, which can cost a hundred
# times as much. Without a margin, buckets tuned on 4,000 steps cost 10 to 46 times too much on the next 4,000.
SPREAD = 0.25
NEAR_POINTS = 1500
FAR_POINTS = 150
FAR_SHARE = 0.02


def with_margin(steps: Steps, limits: Limits, margin: float) -> tuple[Shapes, NDArray[np.float64]]:
    """(shapes, weights): the observed ones, and a share `margin` of the weight on larger ones near them.

    Shapes are [n, 6] where buckets bound the reach and the log knows it, else [n, 5] with a sparse method, else [n, 4].
    Most of the margin lies on observed shapes whose sizes grew by a random factor (log-normal, about a quarter), a
    fiftieth of it on sizes anywhere between the observed ones and the limits. The same steps give the same margin.
    """
    observed = steps.shapes[:, : _dimensions(steps, limits)]
    if margin == 0.0:
        return observed, steps.forward_counts.astype(np.float64)
    rng = np.random.default_rng(0)
    shares = steps.forward_counts / steps.count
    near = observed[rng.choice(len(observed), NEAR_POINTS, p=shares)]
    sizes = observed.shape[1] - 1
    factors = np.exp(np.abs(rng.normal(0.0, SPREAD, (NEAR_POINTS, sizes))))
    near = _resized(near, np.ceil(near[:, 1:] * factors) + 1, limits)
    far = observed[rng.choice(len(observed), FAR_POINTS)]
    reach = _maxima(far, limits) / np.maximum(far[:, 1:], 1)
    far = _resized(far, np.ceil(far[:, 1:] * reach ** rng.random((FAR_POINTS, sizes))), limits)
    weight = margin * steps.count
    weights = [
        steps.forward_counts * (1.0 - margin),
        np.full(NEAR_POINTS, weight * (1.0 - FAR_SHARE) / NEAR_POINTS),
        np.full(FAR_POINTS, weight * FAR_SHARE / FAR_POINTS),
    ]
    return np.concatenate([observed, near, far]), np.concatenate(weights)


def _dimensions(steps: Steps, limits: Limits) -> int:
    if limits.causal_reach and steps.has_reach:
        return 6
    return 5 if limits.max_selected_blocks else 4


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
    maxima = np.empty((len(shapes), shapes.shape[1] - 1), np.int64)
    maxima[:, 0] = np.where(shapes[:, 0] > 0, most.query_len, limits.max_decode_rows)
    maxima[:, 1:] = (*most.forward.sizes[1:4], flat_tiles(most.query_len))[: shapes.shape[1] - 2]
    return maxima
