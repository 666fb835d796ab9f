"""Buckets as the product of values along each dimension, made as fine as a count of graphs allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.causal_tiles import ALL_TILES, flat_tiles
from vllm_gaudi_ucm.graphs.shapes.ladder import with_reaches, with_rungs
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.reach import without_unreachable
from vllm_gaudi_ucm.graphs.strategies.request import BucketRequest

AXES = ("decode", "prompt", "shared", "unique", "logits", "selected", "reach")
# More values along a dimension than this are never useful, and without a count of graphs they would multiply.
MAX_VALUES = 12
# Whatever prompts there are, their lengths are not known: from one reach to the next it is a factor that pays.
SHORTER = 8

Ladder = Callable[[str, int, int], list[int]]
"""(axis, maximum, n) -> at most n ascending values that end with the maximum."""


@dataclass(frozen=True)
class Grid:
    """Number of values along each axis: rows of steps without and with a causal part, blocks, logits rows, selected
    blocks, tiles that a causal part reaches back (beside no bound)."""

    decode: int = 1
    prompt: int = 1
    shared: int = 1
    unique: int = 1
    logits: int = 1
    selected: int = 1
    reach: int = 0

    def finer(self, axis: str) -> Grid:
        return Grid(**{name: getattr(self, name) + (name == axis) for name in AXES})


def grid_buckets(request: BucketRequest, ladder: Ladder) -> BucketSet:
    """The finest grid of at most `max_graphs` graphs, refined one axis after the other.

    Where not even the coarsest grid fits, the configured maximum alone is left.
    """
    limit = request.max_graphs
    best = BucketSet((), (), request.limits, request.cost)
    if limit is not None and limit < best.num_graphs:
        raise ValueError(f"max_graphs is {limit}, expected at least {best.num_graphs}: the configured maximum")
    absent = {"selected": not request.limits.max_selected_blocks, "reach": not request.limits.causal_reach}
    grid, open_axes = Grid(), [axis for axis in AXES if not absent.get(axis)]
    while open_axes:
        for axis in list(open_axes):
            finer = grid.finer(axis) if best.forward[1:] else grid
            made = _make(request, finer, ladder)
            too_many = limit is not None and made.num_graphs > limit
            if too_many or getattr(finer, axis) > MAX_VALUES:
                open_axes.remove(axis)
            else:
                if made.num_graphs <= best.num_graphs:
                    open_axes.remove(axis)
                grid, best = finer, made
        if not best.forward[1:]:
            break
    return best


def coarsest_grid(request: BucketRequest) -> BucketSet:
    """One value along each axis, its maximum: what `max_graphs` must hold for steps to have a choice at all."""
    return _make(request, Grid(), lambda axis, maximum, n: [maximum])


def _make(request: BucketRequest, grid: Grid, ladder: Ladder) -> BucketSet:
    limits, cost = request.limits, request.cost
    shapes = without_unreachable(_shapes(limits, grid, ladder), limits.dense, cost)
    if limits.max_selected_blocks:
        shapes = with_rungs(shapes, [0, *ladder("selected", limits.max_selected_blocks, grid.selected)], cost)
    if limits.causal_reach and grid.reach:
        shapes = with_reaches(shapes, _reaches(limits, grid.reach), cost)
    return BucketSet(shapes, ladder("logits", limits.max_num_seqs, grid.logits), limits, cost)


def _reaches(limits: Limits, count: int) -> list[int]:
    """So many bounds, the longest an eighth of all rows, each an eighth of the next; and no bound."""
    tiles = flat_tiles(limits.max_num_batched_tokens)
    bounds = {max(1, tiles // SHORTER**power) for power in range(1, count + 1)}
    return [*sorted(bounds), ALL_TILES]


def _shapes(limits: Limits, grid: Grid, ladder: Ladder) -> Iterator[ForwardShape]:
    shared = [0, *ladder("shared", limits.most_shared_blocks, grid.shared)]
    unique = [0, *ladder("unique", limits.max_unique_blocks, grid.unique)]
    rows = {
        False: ladder("decode", limits.max_decode_rows, grid.decode),
        True: ladder("prompt", limits.max_num_batched_tokens, grid.prompt),
    }
    for causal, s, u in product((False, True), shared, unique):
        if causal or s or u:
            yield from (ForwardShape.of(causal, q, s, u) for q in rows[causal])
