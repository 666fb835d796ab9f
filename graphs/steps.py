"""Steps that were observed, as arrays: distinct shapes with the number of times that each occurred."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.cost import Cost, Floats

Shapes = NDArray[np.int64]
"""[n, 4]: causal (0 or 1), query_len, shared_blocks, unique_blocks. A shape dominates another one exactly if it is
nowhere smaller: a phase has `s` and `u` where their sizes are not 0."""


@dataclass(frozen=True)
class Steps:
    """Distinct forward shapes and logits rows of observed steps; the two have graphs of their own.

    forward: [n, 4] shapes; forward_counts: [n]. logits: [m], ascending; logits_counts: [m].
    """

    forward: Shapes
    forward_counts: NDArray[np.int64]
    logits: NDArray[np.int64]
    logits_counts: NDArray[np.int64]

    @classmethod
    def of(cls, buckets: Iterable[Bucket]) -> Steps:
        """Counts shapes; steps without rows run nothing and are left out."""
        rows = np.array(
            [("c" in b.phase, b.query_len, b.shared_blocks, b.unique_blocks, b.logits) for b in buckets if b.query_len],
            np.int64,
        ).reshape(-1, 5)
        forward, forward_counts = np.unique(rows[:, :4], axis=0, return_counts=True)
        logits, logits_counts = np.unique(rows[rows[:, 4] > 0, 4], return_counts=True)
        return cls(forward, forward_counts, logits, logits_counts)

    @property
    def count(self) -> int:
        return int(self.forward_counts.sum())

    def seconds(self, cost: Cost) -> float:
        """What the steps cost unpadded."""
        forward = shape_seconds(cost, self.forward) @ self.forward_counts
        return float(forward + cost.logits_seconds(self.logits) @ self.logits_counts)


def shape_array(shapes: Iterable[ForwardShape]) -> Shapes:
    """Forward shapes as rows."""
    return np.array([("c" in s.phase, *s[1:4]) for s in shapes], np.int64).reshape(-1, 4)


def shape_seconds(cost: Cost, shapes: Shapes) -> Floats:
    """Seconds of each row; the last axis holds the four sizes."""
    return cost.forward_seconds(shapes[..., 0], shapes[..., 1], shapes[..., 2], shapes[..., 3])
