"""Which forward shapes any step can run in; a shape that none can would be warmed for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits


def reaching_step(buckets: BucketSet, shape: ForwardShape) -> Bucket | None:
    """A step within the limits that the lookup puts into `shape`, if there is one.

    Only the largest steps that `shape` dominates need to be tried: if a smaller one runs in it, so do those between.
    """
    for step in _largest_steps(buckets, shape):
        if buckets.lookup(step).forward == shape:
            return step
    return None


def without_unreachable(shapes: Iterable[ForwardShape], limits: Limits, cost: Cost) -> list[ForwardShape]:
    """The shapes that a step can run in; the configured maximum stays, it is the guarantee."""
    buckets = BucketSet(shapes, (), limits, cost)
    maximum = limits.maximum.forward
    return [shape for shape in buckets.forward if shape == maximum or reaching_step(buckets, shape) is not None]


def _largest_steps(buckets: BucketSet, shape: ForwardShape) -> Iterator[Bucket]:
    limits = buckets.limits
    parts = [(True, False) if letter != "-" else (False,) for letter in shape.phase]
    for causal, shared, unique in product(*parts):
        top = limits.phase_maximum(causal, shared, unique, selected=True)
        q, s, u, selected, tiles = (min(size, most) for size, most in zip(shape.sizes, top.sizes, strict=True))
        for some, alone in _within_cache(buckets, s, u):
            if (some > 0, alone > 0) == (shared, unique) and limits.allows(causal, q, some, alone, selected):
                yield ForwardShape.of(causal, q, some, alone, selected, tiles).step(1)


def _within_cache(buckets: BucketSet, s: int, u: int) -> Iterator[tuple[int, int]]:
    """(shared, unique) as large as the cache allows. Where the sum is too large, every division at which another
    shape begins or ends to dominate."""
    room = buckets.limits.max_context_blocks
    if buckets.limits.contiguous or s + u <= room:
        yield s, u
        return
    others = {other.shared_blocks + 1 for other in buckets.forward}
    others |= {room - other.unique_blocks - 1 for other in buckets.forward}
    for some in sorted({s, room - u} | others):
        if room - u <= some <= s:
            yield some, room - some
