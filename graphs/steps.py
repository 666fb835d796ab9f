"""Steps that were observed, as arrays: distinct shapes with the number of times that each occurred."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.cost import Cost, Floats

Shapes = NDArray[np.int64]
"""[n, 4]: causal (0 or 1), query_len, shared_blocks, unique_blocks. A shape dominates another one exactly if it is
nowhere smaller: a phase has `s` and `u` where their sizes are not 0. [n, 5]: selected_blocks, too."""


def _no_selected() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Steps:
    """Distinct forward shapes and logits rows of observed steps; the two have graphs of their own.

    forward: [n, 4] shapes; forward_counts: [n]. logits: [m], ascending; logits_counts: [m].
    selected: [n] selected blocks of each; a shape occurs once for each number of them.
    """

    forward: Shapes
    forward_counts: NDArray[np.int64]
    logits: NDArray[np.int64]
    logits_counts: NDArray[np.int64]
    selected: NDArray[np.int64] = field(default_factory=_no_selected)

    def __post_init__(self) -> None:
        if len(self.selected) != len(self.forward):
            object.__setattr__(self, "selected", np.zeros(len(self.forward), np.int64))

    @classmethod
    def of(cls, buckets: Iterable[Bucket]) -> Steps:
        """Counts shapes; steps without rows run nothing and are left out."""
        run = [bucket for bucket in buckets if bucket.query_len]
        shapes, forward_counts = np.unique(graph_array(run), axis=0, return_counts=True)
        rows = np.array([bucket.logits for bucket in run], np.int64)
        logits, logits_counts = np.unique(rows[rows > 0], return_counts=True)
        return cls(shapes[:, :4], forward_counts, logits, logits_counts, shapes[:, 4])

    @property
    def shapes(self) -> Shapes:
        """[n, 5] shapes with their selected blocks."""
        return np.concatenate([self.forward, self.selected[:, None]], axis=1)

    @property
    def count(self) -> int:
        return int(self.forward_counts.sum())

    def seconds(self, cost: Cost) -> float:
        """What the steps cost unpadded."""
        forward = shape_seconds(cost, self.shapes) @ self.forward_counts
        return float(forward + cost.logits_seconds(self.logits) @ self.logits_counts)


def shape_array(shapes: Iterable[ForwardShape]) -> Shapes:
    """[n, 4] forward shapes as rows, without their selected blocks."""
    return graph_array(shapes)[:, :4]


def graph_array(shapes: Iterable[ForwardShape | Bucket]) -> Shapes:
    """[n, 5] forward shapes as rows, selected blocks last."""
    return np.array(
        [("c" in s.phase, s.query_len, s.shared_blocks, s.unique_blocks, s.selected_blocks) for s in shapes], np.int64
    ).reshape(-1, 5)


def shape_seconds(cost: Cost, shapes: Shapes) -> Floats:
    """Seconds of each row; the last axis holds the four sizes, or five with selected blocks."""
    return cost.forward_seconds(*np.moveaxis(shapes, -1, 0))
