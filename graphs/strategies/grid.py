"""Chooses buckets as the product of values along each dimension, as fine as the number of graphs allows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost, Floats
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.few_shapes import few_shapes
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES, flat_tiles
from vllm_gaudi_ucm.graphs.shapes.size_levels import with_prompt_tile_levels, with_selected_levels, without_unreachable
from vllm_gaudi_ucm.graphs.shapes.sparse_decodes import sparse_decodes, sparse_verifications
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest, BucketStrategy

AXES = ("decode", "prompt", "shared", "unique", "logits", "selected", "prompt_tiles")
# More values along a dimension are never useful; without a limit on graphs, they would multiply.
MAX_VALUES = 12
# Graphs for decodes of a sparse method if the number of graphs is not limited.
MOST_SPARSE = 24
# The lengths of prompts are unknown: from one level of prompt tiles to the next, a constant factor pays off.
SHORTER = 8


@dataclass(frozen=True)
class Grid:
    """Number of size levels along each axis.

    Rows of steps without and with a causal part, blocks, logits rows, selected blocks, max prompt tiles (in addition to
    no bound).
    """

    decode: int = 1
    prompt: int = 1
    shared: int = 1
    unique: int = 1
    logits: int = 1
    selected: int = 1
    prompt_tiles: int = 0

    def finer(self, axis: str) -> Grid:
        return Grid(**{name: getattr(self, name) + (name == axis) for name in AXES})


@dataclass(frozen=True)
class GridStrategy(BucketStrategy):
    """The finest grid of at most `max_graphs` graphs, refined one axis after the other.

    If not even the coarsest grid fits, decodes get graphs of their own before prompts get any in addition to the
    configured maximum (`few_shapes`).
    """

    @abstractmethod
    def levels(self, cost: Cost, axis: str, maximum: int, n: int) -> list[int]:
        """Returns at most n ascending sizes along an axis; the last one is the maximum."""

    def choose(self, request: BucketRequest) -> BucketSet:
        limit = request.max_graphs
        best = BucketSet((), (), request.limits, request.cost)
        if limit is not None and limit < best.num_graphs:
            raise ValueError(f"max_graphs is {limit}, expected at least {best.num_graphs}: the configured maximum")
        family = self._sparse_decodes(request)
        if family:
            rest = replace(request, max_graphs=None if limit is None else limit - len(family), live_blocks=0)
            grid_buckets = self.choose(rest)
            forward, logits = [*grid_buckets.forward, *family], grid_buckets.logits
            return BucketSet(forward, logits, request.limits, request.cost)
        if limit is not None and limit < coarsest_grid(request).num_graphs:
            # verifications of drafts are the first to share graphs with prompts
            request = replace(request, rows_each=1)
        absent = {
            "selected": not request.limits.max_selected_blocks,
            "prompt_tiles": not request.limits.bounds_prompt_tiles,
        }
        if not request.limits.has_cache:
            # an encoder's steps have rows alone
            absent |= dict.fromkeys(set(AXES) - {"prompt"}, True)
        grid, open_axes = Grid(), [axis for axis in AXES if not absent.get(axis)]
        # without a cache the coarsest grid is the maximum, with which `best` begins
        is_coarsest = request.limits.has_cache
        while open_axes:
            for axis in list(open_axes):
                finer = grid if is_coarsest and not best.forward[1:] else grid.finer(axis)
                made = self._buckets(request, finer)
                too_many = limit is not None and made.num_graphs > limit
                if too_many or getattr(finer, axis) > MAX_VALUES:
                    open_axes.remove(axis)
                else:
                    if made.num_graphs <= best.num_graphs:
                        open_axes.remove(axis)
                    grid, best = finer, made
            if is_coarsest and not best.forward[1:]:
                break
        if limit is not None and coarsest_grid(request).num_graphs > limit:
            return self._few(request, limit)
        return best

    def _few(self, request: BucketRequest, limit: int) -> BucketSet:
        """Returns those of the most urgent shapes that some step runs in."""
        limits, cost = request.limits, request.cost
        sparse = sparse_decodes(limits, cost, request.live_blocks, 1, partial(self.levels, cost))
        # one is the maximum, and one for logits
        shapes = few_shapes(coarsest_grid(request), sparse, limit - 2)
        return BucketSet(without_unreachable(shapes, limits, cost), (), limits, cost)

    def _sparse_decodes(self, request: BucketRequest) -> list[ForwardShape]:
        """Returns shapes for decodes of a sparse method, and for verifications: at most a third of the graphs, and
        never graphs that the grid needs.
        """
        limit = 3 * MOST_SPARSE if request.max_graphs is None else request.max_graphs
        if not request.live_blocks or not request.limits.max_selected_blocks:
            return []
        most = min(limit // 3, limit - self.least_graphs(request))
        levels = partial(self.levels, request.cost)
        limits, cost, live = request.limits, request.cost, request.live_blocks
        verifications = sparse_verifications(limits, cost, live, request.rows_each, most // 2, levels)
        return [*sparse_decodes(limits, cost, live, most - len(verifications), levels), *verifications]

    def least_graphs(self, request: BucketRequest) -> int:
        """Without graphs of their own for verifications of drafts."""
        return coarsest_grid(replace(request, rows_each=1)).num_graphs

    def _buckets(self, request: BucketRequest, grid: Grid) -> BucketSet:
        return _make(request, grid, partial(self.levels, request.cost))


Levels = Callable[[str, int, int], list[int]]
"""A function of (axis, maximum, n) that returns at most n ascending sizes, the last of them the maximum."""


def coarsest_grid(request: BucketRequest) -> BucketSet:
    """The grid of one size along each axis, its maximum. With a smaller `max_graphs`, steps have no choice at all."""
    return _make(request, Grid(), lambda axis, maximum, n: [maximum])


def _make(request: BucketRequest, grid: Grid, levels: Levels) -> BucketSet:
    limits, cost = request.limits, request.cost
    shapes = without_unreachable(_shapes(limits, grid, levels, request.rows_each), limits.dense, cost)
    if limits.max_selected_blocks:
        shapes = with_selected_levels(shapes, [0, *levels("selected", limits.max_selected_blocks, grid.selected)], cost)
    if limits.bounds_prompt_tiles and grid.prompt_tiles:
        shapes = with_prompt_tile_levels(shapes, _prompt_tile_levels(limits, grid.prompt_tiles), cost)
    return BucketSet(shapes, levels("logits", limits.max_num_seqs, grid.logits), limits, cost)


def _prompt_tile_levels(limits: Limits, count: int) -> list[int]:
    """Returns `count` bounds, the largest an eighth of all rows, each an eighth of the next; and no bound."""
    tiles = flat_tiles(limits.max_num_batched_tokens)
    bounds = {max(1, tiles // SHORTER**power) for power in range(1, count + 1)}
    return [*sorted(bounds), ALL_TILES]


def _shapes(limits: Limits, grid: Grid, levels: Levels, rows_each: int) -> Iterator[ForwardShape]:
    blocks = {"shared": (limits.most_shared_blocks, grid.shared), "unique": (limits.max_unique_blocks, grid.unique)}
    shared, unique = ([0, *(levels(axis, most, n) if most else ())] for axis, (most, n) in blocks.items())
    rows = {
        False: levels("decode", limits.max_decode_rows, grid.decode),
        True: levels("prompt", limits.max_num_batched_tokens, grid.prompt),
    }
    verified = _verified_rows(limits, rows[False], rows_each)
    for causal, s, u in product((False, True), shared, unique):
        if causal or s or u:
            # blocks of a request with several rows are shared blocks, where there are any
            verifies = causal and (s if limits.most_shared_blocks else u)
            sizes = sorted({*rows[causal], *verified}) if verifies else rows[causal]
            yield from (ForwardShape.from_sizes(causal, q, s, u) for q in sizes)


def _verified_rows(limits: Limits, requests: list[int], rows_each: int) -> list[int]:
    """Returns rows of steps in which so many requests verify drafts; none without drafts. In a graph of a prompt, such
    a step would compute a prompt's rows.
    """
    if rows_each < 2:
        return []
    return [rows_each * count for count in requests if rows_each * count < limits.max_num_batched_tokens]


@dataclass(frozen=True)
class Exponential(GridStrategy):
    """Few buckets, and padding bounded by a factor for any traffic."""

    def levels(self, cost: Cost, axis: str, maximum: int, n: int) -> list[int]:
        """Returns n sizes; neighbours differ by the n-th root of the maximum."""
        return sorted({max(1, round(maximum ** (step / n))) for step in range(1, n + 1)} | {maximum})


@dataclass(frozen=True)
class Linear(GridStrategy):
    """Little padding near the limits, much of it far below them."""

    def levels(self, cost: Cost, axis: str, maximum: int, n: int) -> list[int]:
        """Returns n sizes at distances of maximum / n."""
        return sorted({-(-maximum * step // n) for step in range(1, n + 1)})


@dataclass(frozen=True)
class PaddingAware(GridStrategy):
    """Each level of a dimension multiplies the cost by the same factor, the smallest that the graphs allow."""

    def levels(self, cost: Cost, axis: str, maximum: int, n: int) -> list[int]:
        """Returns n sizes that divide the growth of the cost along an axis into equal factors, other sizes small."""
        sizes = np.unique(np.geomspace(1, maximum, min(maximum, 2048)).astype(np.int64))
        seconds = _along(cost, axis, sizes)
        wanted = seconds[0] * (seconds[-1] / seconds[0]) ** (np.arange(1, n + 1) / n)
        # The largest size within a wanted cost: if size is free, one value covers everything.
        chosen = np.clip(np.searchsorted(seconds, wanted * (1 + 1e-12), side="right") - 1, 0, None)
        return sorted({*sizes[chosen].tolist(), maximum})


def _along(cost: Cost, axis: str, sizes: np.ndarray) -> Floats:
    if axis == "logits":
        return cost.logits_seconds(sizes)
    if axis == "shared":
        return cost.forward_seconds(False, 2, sizes, 0)
    if axis == "selected":
        return cost.forward_seconds(False, 1, 0, 0, sizes)
    if axis == "unique":
        return cost.forward_seconds(False, 1, 0, sizes)
    return cost.forward_seconds(axis == "prompt", sizes, 0, 0)
