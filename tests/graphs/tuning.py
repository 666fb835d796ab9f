"""Helpers of `test_tuning.py` that other tests use, too."""

from __future__ import annotations

import numpy as np

from tests.graphs.shapes import COST, LIMITS
from vllm_gaudi_ucm.graphs.lookup import cheapest_fit
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.shapes.steps import Shapes, graph_array, shape_seconds

MAXIMUM = graph_array([LIMITS.maximum.forward])[:, :4]


def random_steps(seed: int, count: int) -> list[Bucket]:
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        rows, shared, unique = int(rng.integers(1, 17)), int(rng.integers(0, 40)), int(rng.integers(1, 80))
        if rng.random() < 0.4:
            steps.append(Bucket("csu" if shared else "c-u", rows * 15, shared, unique, min(rows, 16)))
        else:
            steps.append(Bucket("-su" if shared else "--u", rows, shared, unique, rows))
    return steps


def seconds_of(shapes: Shapes, points: Shapes, counts: np.ndarray) -> float:
    everything = np.concatenate([shapes, MAXIMUM])
    ordered = everything[np.argsort(shape_seconds(COST, everything), kind="stable")]
    return float(shape_seconds(COST, ordered)[cheapest_fit(ordered, points)] @ counts)


def sparse_steps(seed: int, count: int) -> list[Bucket]:
    """Most decodes select blocks, more of them the more rows they have."""
    rng = np.random.default_rng(seed)
    return [
        step._replace(selected_blocks=int(rng.integers(0, 3 * step.logits)) if rng.random() < 0.8 else 0)
        for step in random_steps(seed, count)
    ]
