"""Compares the modelled cost of steps in a set of buckets with their cost without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.steps import Steps, graph_array, shape_seconds


@dataclass(frozen=True)
class Padding:
    """Sums over steps; seconds are modelled.

    seconds, true_seconds: padded, and at true shapes.
    axes: padded over true size of each dimension (1 if the steps have none of it).
    used: [forward buckets] steps in each. true, padded: [forward buckets] their seconds.
    maximum_steps: steps that only the configured maximum could hold.
    """

    buckets: BucketSet
    seconds: float
    true_seconds: float
    axes: dict[str, float]
    used: NDArray[np.int64]
    true: NDArray[np.float64]
    padded: NDArray[np.float64]

    @property
    def ratio(self) -> float:
        """Padded cost over true cost."""
        return self.seconds / self.true_seconds

    @property
    def maximum_steps(self) -> int:
        return int(self.used[self.buckets.forward.index(self.buckets.limits.maximum.forward)])

    def by_bucket(self) -> list[tuple[ForwardShape, int, float]]:
        """Returns (bucket, steps, padded over true seconds) of the buckets in use, the most seconds first."""
        order = [int(index) for index in np.argsort(-self.padded) if self.used[index]]
        return [
            (self.buckets.forward[index], int(self.used[index]), float(self.padded[index] / self.true[index]))
            for index in order
        ]

    def unused(self) -> list[ForwardShape]:
        """Returns the buckets in which no step ran."""
        return [shape for shape, steps in zip(self.buckets.forward, self.used, strict=True) if not steps]

    def to_json(self) -> dict[str, Any]:
        """Returns the sums as plain values."""
        return {
            "cost_ratio": round(self.ratio, 5),
            "padded_seconds": round(self.seconds, 6),
            "true_seconds": round(self.true_seconds, 6),
            "size_ratios": {axis: round(value, 4) for axis, value in self.axes.items()},
            "maximum_steps": self.maximum_steps,
        }


def measure_padding(buckets: BucketSet, steps: Steps) -> Padding:
    """Looks up the bucket of every step, and adds up the costs. The steps must be within the limits."""
    cost = buckets.cost
    forward, shapes = graph_array(buckets.forward), steps.shapes
    found = buckets.assign(shapes)
    rows = np.array(buckets.logits)
    padded_rows = rows[np.searchsorted(rows, steps.logits)]
    n = len(forward)
    used = np.bincount(found, steps.forward_counts, n)
    true = np.bincount(found, shape_seconds(cost, shapes) * steps.forward_counts, n)
    padded = shape_seconds(cost, forward) * used
    logits_seconds = [float(cost.logits_seconds(sizes) @ steps.logits_counts) for sizes in (padded_rows, steps.logits)]
    sizes = steps.forward_counts @ shapes, steps.forward_counts @ forward[found]
    axes = {name: _ratio(sizes[1][axis], sizes[0][axis]) for axis, name in enumerate(("query", "shared", "unique"), 1)}
    if buckets.limits.max_selected_blocks:
        axes["selected"] = _ratio(sizes[1][4], sizes[0][4])
    axes["logits"] = _ratio(int(padded_rows @ steps.logits_counts), int(steps.logits @ steps.logits_counts))
    return Padding(
        buckets,
        seconds=float(padded.sum()) + logits_seconds[0],
        true_seconds=float(true.sum()) + logits_seconds[1],
        axes=axes,
        used=used.astype(np.int64),
        true=true.astype(np.float64),
        padded=padded,
    )


def _ratio(padded: float, true: float) -> float:
    return float(padded / true) if true else 1.0
