"""Size levels of buckets that are chosen without knowing the traffic, and which shapes are worth a graph."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.steps import graph_array, shape_seconds

# A level has no graph of its own if the next one costs at most this share more: next to a long prompt the selected part
# is small, whatever its size. At 64 graphs the product of all shapes and four levels leaves 14 shapes, and without the
# needless ones 26 to 35; the trace mixes then cost a third if steps select a quarter of their contexts (modelled).
NEEDLESS = 0.1


def with_selected_levels(shapes: Iterable[ForwardShape], levels: Sequence[int], cost: Cost) -> list[ForwardShape]:
    """Returns every shape at every level of selected blocks, without the needless ones.

    Selected blocks add to the cost of a step, whatever its other sizes. So the cheapest bucket of a step is the
    cheapest one for its other sizes, at the smallest of its levels that is enough.

    Args:
        shapes: shapes without selected blocks.
        levels: ascending, the first 0; the last one is always kept.
    """
    found: list[ForwardShape] = []
    for shape in shapes:
        # decodes of requests that are not sparse must not pay for sparse ones
        least = shape.with_selected(0) if "c" not in shape.phase else None
        found += _worth([shape.with_selected(level) for level in levels], cost, least)
    return found


def with_prompt_tile_levels(shapes: Iterable[ForwardShape], levels: Sequence[int], cost: Cost) -> list[ForwardShape]:
    """Returns every shape at every level of max prompt tiles, without the needless ones; only long prompts have more
    than one.

    Args:
        levels: ascending; the last one, which is no bound, is always kept.
    """
    found: list[ForwardShape] = []
    for shape in shapes:
        found += _worth(list(dict.fromkeys(shape.with_prompt_tiles(level) for level in levels)), cost)
    return found


def _worth(at_levels: list[ForwardShape], cost: Cost, keep: ForwardShape | None = None) -> list[ForwardShape]:
    """Returns the shapes that are cheaper by more than NEEDLESS than the next larger one that is kept."""
    found = []
    seconds = shape_seconds(cost, graph_array(at_levels)).tolist()
    above = float("inf")
    for each, its_seconds in zip(reversed(at_levels), reversed(seconds), strict=True):
        if each == keep or above > (1.0 + NEEDLESS) * its_seconds:
            found.append(each)
            above = its_seconds
    return found


def reaching_step(buckets: BucketSet, shape: ForwardShape) -> Bucket | None:
    """Returns a step within the limits that the lookup puts into `shape`, if there is one.

    Only the largest steps that `shape` dominates need to be tried: if a smaller one runs in it, so do the steps in
    between.
    """
    for step in _largest_steps(buckets, shape):
        if buckets.lookup(step).forward == shape:
            return step
    return None


def without_unreachable(shapes: Iterable[ForwardShape], limits: Limits, cost: Cost) -> list[ForwardShape]:
    """Returns the shapes that some step runs in, and the configured maximum, which every step can run in."""
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
                yield ForwardShape.from_sizes(causal, q, some, alone, selected, tiles).step(1)


def _within_cache(buckets: BucketSet, s: int, u: int) -> Iterator[tuple[int, int]]:
    """Returns (shared, unique) as large as the cache allows. If the sum is too large, returns every division at which
    another shape starts or stops dominating.
    """
    room = buckets.limits.max_context_blocks
    if buckets.limits.contiguous or s + u <= room:
        yield s, u
        return
    others = {other.shared_blocks + 1 for other in buckets.forward}
    others |= {room - other.unique_blocks - 1 for other in buckets.forward}
    for some in sorted({s, room - u} | others):
        if room - u <= some <= s:
            yield some, room - some
