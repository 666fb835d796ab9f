"""Observed steps as arrays: distinct shapes, and how often each one occurred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost, Floats
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, least_prompt_tiles
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, LimitsError
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import flat_tiles

Shapes = NDArray[np.int64]
"""[n, 4]: causal (0 or 1), query_len, shared_blocks, unique_blocks. A shape dominates another exactly if no size is
smaller: a phase has `s` and `u` if their sizes are not 0. [n, 5]: also selected_blocks; [n, 6]: also
max prompt tiles (`max_prompt_tiles`), 0 if there is no causal part.
"""


def _not_given() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Steps:
    """Distinct forward shapes and logits rows of observed steps; the two have graphs of their own.

    forward: [n, 4] shapes; forward_counts: [n]. logits: [m], ascending; logits_counts: [m].
    selected, prompt_tiles: [n] selected blocks and max prompt tiles of each; a shape occurs once for each number of
        them. Without them, no blocks are selected, and rows may look back on all rows before them.
    """

    forward: Shapes
    forward_counts: NDArray[np.int64]
    logits: NDArray[np.int64]
    logits_counts: NDArray[np.int64]
    selected: NDArray[np.int64] = field(default_factory=_not_given)
    prompt_tiles: NDArray[np.int64] = field(default_factory=_not_given)

    def __post_init__(self) -> None:
        if len(self.selected) != len(self.forward):
            object.__setattr__(self, "selected", np.zeros(len(self.forward), np.int64))
        if len(self.prompt_tiles) != len(self.forward):
            object.__setattr__(self, "prompt_tiles", _all_rows(self.forward))

    @classmethod
    def from_buckets(cls, buckets: Iterable[Bucket]) -> Steps:
        """Counts shapes one step at a time: memory grows with the distinct shapes, not with the steps.

        Steps without rows run nothing and are left out.
        """
        forward: Counter[tuple[int, ...]] = Counter()
        rows: Counter[int] = Counter()
        for bucket in buckets:
            if bucket.query_len:
                forward[_row(bucket)] += 1
                rows[bucket.logits] += 1
        del rows[0]
        shapes = np.array(sorted(forward), np.int64).reshape(-1, 6)
        counts = np.array([count for _, count in sorted(forward.items())], np.int64)
        logits, logits_counts = np.array(sorted(rows.items()), np.int64).reshape(-1, 2).T
        return cls(shapes[:, :4], counts, logits, logits_counts, shapes[:, 4], shapes[:, 5])

    @property
    def shapes(self) -> Shapes:
        """Returns [n, 6] shapes with their selected blocks and max prompt tiles."""
        return np.concatenate([self.forward, self.selected[:, None], self.prompt_tiles[:, None]], axis=1)

    def with_shapes(self, shapes: Shapes) -> Steps:
        """Returns the same steps with other shapes [n, 6], one for each present shape; equal shapes are merged."""
        distinct, places = np.unique(shapes, axis=0, return_inverse=True)
        counts = np.zeros(len(distinct), np.int64)
        np.add.at(counts, places.reshape(-1), self.forward_counts)
        return Steps(distinct[:, :4], counts, self.logits, self.logits_counts, distinct[:, 4], distinct[:, 5])

    def without_prompt_tiles(self) -> Steps:
        """Returns the steps for a device whose buckets do not bound how far rows look back."""
        shapes = self.shapes
        shapes[:, 5] = _all_rows(shapes)
        return self.with_shapes(shapes)

    @property
    def has_prompt_tiles(self) -> bool:
        """True if any causal step is known to look back on fewer than all rows."""
        return bool((self.prompt_tiles < _all_rows(self.forward)).any())

    @property
    def count(self) -> int:
        return int(self.forward_counts.sum())

    def seconds(self, cost: Cost) -> float:
        """Returns the cost of the steps without padding."""
        forward = shape_seconds(cost, self.shapes) @ self.forward_counts
        return float(forward + cost.logits_seconds(self.logits) @ self.logits_counts)


def graph_array(shapes: Iterable[ForwardShape | Bucket]) -> Shapes:
    """Returns [n, 6] forward shapes as rows, selected blocks and max prompt tiles last."""
    return np.array([_row(shape) for shape in shapes], np.int64).reshape(-1, 6)


def shape_seconds(cost: Cost, shapes: Shapes) -> Floats:
    """Returns the seconds of each row; the last axis holds four sizes or more (see `Shapes`)."""
    return cost.forward_seconds(*np.moveaxis(shapes, -1, 0))


def _row(shape: ForwardShape | Bucket) -> tuple[int, ...]:
    sizes = (shape.query_len, shape.shared_blocks, shape.unique_blocks, shape.selected_blocks)
    return int("c" in shape.phase), *sizes, least_prompt_tiles(shape)


def _all_rows(shapes: Shapes) -> NDArray[np.int64]:
    """Returns [n], the max prompt tiles of steps that may look back on all rows."""
    return np.where(shapes[:, 0] > 0, flat_tiles(shapes[:, 1]), 0)


def steps_within(steps: Steps, limits: Limits) -> Steps:
    """Returns the steps with their blocks cut to `limits`.

    The steps may come from a larger cache, from a cache that was read in slices (which cover unused blocks), or from a
    server that did not divide steps with many shared blocks. Rows and requests are not cut: if they exceed the limits,
    the steps come from a different server (see `check_steps`). Max prompt tiles are left out if buckets do not bound
    them.
    """
    most = limits.maximum
    shapes = steps.shapes
    shapes[:, 2:5] = np.minimum(shapes[:, 2:5], [most.shared_blocks, most.unique_blocks, most.selected_blocks])
    cut = steps.with_shapes(shapes)
    return cut if limits.bounds_prompt_tiles else cut.without_prompt_tiles()


def check_steps(steps: Steps, limits: Limits) -> None:
    """Raises a LimitsError that names the limit that observed steps exceed, or says that there are no steps."""
    if not steps.count:
        raise LimitsError("there are no steps to choose buckets for")
    most = limits.maximum
    seen = [
        *steps.forward[:, 1:].max(axis=0).tolist(),
        int(steps.logits.max(initial=0)),
        int(steps.selected.max(initial=0)),
    ]
    for name, size, limit in zip(most._fields[1:6], seen, most[1:6], strict=True):
        if size > limit:
            raise LimitsError(
                f"observed steps have {name} {size}, the limits allow {limit}; give the limits of the server that "
                "wrote the log"
            )
