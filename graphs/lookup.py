"""Finds the bucket of a step: the cheapest one that dominates it. Within the limits, one always exists."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, phase_string
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, LimitsError
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import flat_tiles
from vllm_gaudi_ucm.graphs.shapes.steps import Shapes, graph_array, shape_seconds


class BucketSet:
    """Forward shapes and logits rows that have graphs, and the look-up over them: a pure function of the step's sizes.

    Forward shapes are kept in ascending order of cost. Each value of a dimension has the set of shapes that are large
    enough, as the bits of an integer. The intersection over all dimensions holds the shapes that dominate a step; its
    lowest bit is the cheapest, which is the step's own shape if that is a bucket. This takes three binary searches and
    three bitwise ands (about 1 microsecond at 64 buckets); a sparse method adds one of each, for selected blocks, and
    so do max prompt tiles if buckets bound them.

    Args:
        forward: forward shapes; `limits.maximum` is added if missing.
        logits: logits rows; `limits.max_num_seqs` is added if missing.
        limits: bounds that steps keep within.
        cost: decides which of several shapes that dominate a step is the cheapest.
    """

    def __init__(self, forward: Iterable[ForwardShape], logits: Iterable[int], limits: Limits, cost: Cost) -> None:
        self.limits = limits
        self.cost = cost
        maximum = limits.maximum
        self.forward = _by_cost({_checked(shape) for shape in forward} | {maximum.forward}, cost)
        self.logits = tuple(sorted({*logits, maximum.logits}))
        if self.logits[0] < 1:
            raise ValueError(f"logits bucket {self.logits[0]}: expected at least 1 row")
        self._phases = {
            phase: _bits(
                all(p in ("-", have) for p, have in zip(phase, shape.phase, strict=True)) for shape in self.forward
            )
            for phase in (phase_string(*parts) for parts in product((False, True), repeat=3))
        }
        self._query, self._shared, self._unique, self._selected, self._prompt_tiles = (
            _Axis(sizes) for sizes in list(zip(*self.forward, strict=True))[1:]
        )
        self.selected = tuple(self._selected.values)
        """The different numbers of selected blocks, ascending; the last one is the limit."""
        self._has_selected = self.selected != (0,)
        self._has_prompt_tiles = len(self._prompt_tiles.values) > 1

    @property
    def num_graphs(self) -> int:
        return len(self.forward) + len(self.logits)

    def lookup(self, step: Bucket) -> Bucket:
        """Returns the cheapest bucket that dominates `step`.

        Raises:
            LimitsError: the step exceeds the limits that the set was made for.
        """
        phase, query_len, shared_blocks, unique_blocks, logits, selected_blocks, prompt_tiles = step
        query, shared, unique = self._query, self._shared, self._unique
        fitting = (
            self._phases[phase]
            & query.fitting[bisect_left(query.values, query_len)]
            & shared.fitting[bisect_left(shared.values, shared_blocks)]
            & unique.fitting[bisect_left(unique.values, unique_blocks)]
        )
        if self._has_selected or selected_blocks:
            fitting &= self._selected.fitting[bisect_left(self.selected, selected_blocks)]
        if self._has_prompt_tiles and "c" in phase:
            prompt_tiles = min(prompt_tiles, flat_tiles(query_len))
            fitting &= self._prompt_tiles.fitting[bisect_left(self._prompt_tiles.values, prompt_tiles)]
        row = bisect_left(self.logits, logits)
        if not fitting or row == len(self.logits):
            raise LimitsError(_beyond(step, self.limits))
        found = self.forward[(fitting & -fitting).bit_length() - 1]
        return found.step(self.logits[row] if logits else 0)

    def logits_rows(self, count: int) -> int:
        """Returns the rows of the smallest logits bucket that holds `count`; 0 for 0."""
        return self.logits[bisect_left(self.logits, count)] if count else 0

    def assign(self, shapes: Shapes) -> NDArray[np.int64]:
        """Looks up many shapes at once: [n] the index into `forward` of the cheapest shape that dominates each.

        Args:
            shapes: [n, 4] to [n, 6] (see `Shapes`); further dimensions of the buckets are ignored.
        """
        return cheapest_fit(graph_array(self.forward)[:, : shapes.shape[1]], shapes)


class NotWarmError(RuntimeError):
    """Raised if a step is looked up before the configured maximum is warm."""


class WarmState(NamedTuple):
    """The warm graphs at one moment. Immutable: a change in another thread never shows halfway."""

    wanted: BucketSet
    """Every bucket that is or will be warm."""
    warm: BucketSet | None
    """The warm buckets; None until the configured maximum (forward shape and logits rows) is warm: only then every step
    has a bucket.
    """
    warm_keys: frozenset[ForwardShape | int]
    cold_keys: frozenset[ForwardShape | int]

    def lookup(self, step: Bucket) -> tuple[Bucket, Bucket]:
        """Returns (the cheapest bucket that dominates `step`, the cheapest warm one that does).

        A pure function of the step and of the warm keys: workers that agree on these choose the same graph.

        Raises:
            LimitsError: the step exceeds the limits that the buckets were made for.
            NotWarmError: not even the configured maximum is warm.
        """
        if self.warm is None:
            raise NotWarmError(f"step {step.to_list()} before the configured maximum is warm; run the skeleton first")
        best = self.wanted.lookup(step)
        return best, self.warm.lookup(step) if self.cold_keys else best


class _Axis:
    """The distinct values of one dimension, and for each the shapes (as bits) that are at least as large.

    `fitting` has one entry more than `values`: beyond the last value nothing fits.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.values = sorted(set(sizes))
        self.fitting = [_bits(size >= value for size in sizes) for value in self.values] + [0]


def cheapest_fit(ordered: Shapes, shapes: Shapes) -> NDArray[np.int64]:
    """Returns [n], the first row of `ordered` (ascending cost) that dominates each of `shapes`, or -1."""
    found = np.full(len(shapes), -1, np.int64)
    open_rows = np.arange(len(shapes))
    for index, shape in enumerate(ordered):
        fits = (shapes[open_rows] <= shape).all(axis=1)
        found[open_rows[fits]] = index
        open_rows = open_rows[~fits]
        if not open_rows.size:
            break
    return found


def _by_cost(shapes: Iterable[ForwardShape], cost: Cost) -> tuple[ForwardShape, ...]:
    """Sorts the cheapest first; among equals smaller sizes first, so that a shape comes before all that dominate it."""
    listed = sorted(shapes, key=lambda shape: (shape.sizes, "c" in shape.phase))
    seconds = shape_seconds(cost, graph_array(listed))
    return tuple(listed[index] for index in np.argsort(seconds, kind="stable"))


def _checked(shape: ForwardShape) -> ForwardShape:
    expected = ForwardShape.from_sizes("c" in shape.phase, *shape.sizes)
    if shape[:5] != expected[:5] or min(shape.sizes[:4]) < 0 or shape.query_len < 1 or shape.max_prompt_tiles < 1:
        raise ValueError(
            f"bucket {shape.to_list()}: expected at least one row, at least one prompt tile, and the phase "
            f"{expected.phase!r} for these blocks"
        )
    return expected


def _bits(flags: Iterable[bool]) -> int:
    return sum(1 << index for index, flag in enumerate(flags) if flag)


def _beyond(step: Bucket, limits: Limits) -> str:
    beyond = [
        f"{name} {size} > {most}"
        for name, size, most in zip(Bucket._fields[1:], step[1:], limits.maximum[1:], strict=True)
        if size > most
    ]
    return (
        f"step {step.to_list()} exceeds the limits of the buckets ({', '.join(beyond)}); "
        "they were made for a server with smaller limits"
    )
