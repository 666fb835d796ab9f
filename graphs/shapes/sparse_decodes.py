"""Shapes for decodes and verifications of a sparse method: few live blocks for each request, and the chosen ones.

A grid over the limits has no such shapes: its smallest unique part is sized for dense requests, many times more.
"""

from collections.abc import Callable

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.steps import graph_array, shape_seconds

# From one size to the next, the cost grows by no more than this share, if there are enough graphs.
FINE = 0.1
MOST_LEVELS = 8

Levels = Callable[[str, int, int], list[int]]
"""A function of (axis, maximum, n) that returns at most n ascending sizes, the last of them the maximum."""


def sparse_decodes(limits: Limits, cost: Cost, live_blocks: int, most: int, levels: Levels) -> list[ForwardShape]:
    """Returns at most `most` shapes in which all requests of a step decode with chosen blocks; none without a sparse
    method.

    A shared part has room for the live blocks of one prefix that requests have in common.

    Args:
        limits: limits of the server. If the unique part is a slice of the cache, its size does not tell its blocks, and
            there are no such shapes.
        live_blocks: most blocks of a request that are always attended; 0: unknown.
        levels: how sizes are divided.
    """
    rows, selected = limits.max_decode_rows, limits.max_selected_blocks
    unique = min(rows * live_blocks, limits.max_unique_blocks)
    if not selected or not unique or limits.contiguous or limits.strip:
        return []

    def made(of_unique: int, of_selected: int) -> list[ForwardShape]:
        blocks, chosen = levels("unique", unique, of_unique), levels("selected", selected, of_selected)
        alone = [ForwardShape.from_sizes(False, rows, 0, some, many) for some in blocks for many in chosen]
        common = min(live_blocks, limits.most_shared_blocks)
        # every other size, and the largest
        return alone + [ForwardShape.from_sizes(False, rows, common, unique, many) for many in chosen[::-2]]

    return _finest(made, most, cost, ("unique_blocks", "selected_blocks"))


def sparse_verifications(
    limits: Limits, cost: Cost, live_blocks: int, rows_each: int, most: int, levels: Levels
) -> list[ForwardShape]:
    """Returns at most `most` shapes in which the requests of a step verify drafts with chosen blocks; none without
    drafts.

    The live blocks of a request with several rows are shared blocks, together with a causal part. As some requests may
    have no drafts in a step, a few shapes have room for unique blocks, too.

    Args:
        rows_each: most rows of a request: one plus its drafts.
        limits, cost, live_blocks, most, levels: see `sparse_decodes`.
    """
    rows = min(limits.max_num_seqs * rows_each, limits.max_num_batched_tokens)
    selected = limits.max_selected_blocks
    unique = min(limits.max_decode_rows * live_blocks, limits.max_unique_blocks)
    if rows_each < 2 or rows < 2 or not selected or not unique or limits.contiguous or limits.strip:
        return []

    def made(of_rows: int, of_selected: int) -> list[ForwardShape]:
        sizes, chosen = levels("prompt", rows, of_rows), levels("selected", selected, of_selected)
        found = []
        for size in sizes:
            live = min(-(-size // rows_each) * live_blocks, limits.most_shared_blocks)
            found += [ForwardShape.from_sizes(True, max(size, 2), live, 0, many) for many in chosen]
        mixed = min(unique, limits.max_context_blocks - min(unique, limits.most_shared_blocks))
        if mixed > 0 and limits.max_num_seqs > 1:
            live = min(unique, limits.most_shared_blocks)
            found += [ForwardShape.from_sizes(True, rows, live, mixed, many) for many in chosen[::-2]]
        return found

    return _finest(made, most, cost, ("query_len", "selected_blocks"))


def _finest(
    made: Callable[[int, int], list[ForwardShape]], most: int, cost: Cost, axes: tuple[str, str]
) -> list[ForwardShape]:
    """Returns at most `most` shapes with the least padding. made: makes shapes from the sizes along each axis."""
    counts, best = (1, 1), made(1, 1)
    if len(best) > most:
        return best[: max(0, most)]
    for _ in range(2 * MOST_LEVELS):
        finer = [(counts[0] + 1, counts[1]), (counts[0], counts[1] + 1)]
        fitting = [(one, made(*one)) for one in finer if max(one) <= MOST_LEVELS]
        fitting = [(one, shapes) for one, shapes in fitting if len(best) < len(shapes) <= most]
        if not fitting:
            break
        now = _worst(best, cost, axes)
        if now <= 1 + FINE:
            break
        counts, best = min(fitting, key=lambda item: (_worst(item[1], cost, axes), len(item[1])))
    return best


def _worst(shapes: list[ForwardShape], cost: Cost, axes: tuple[str, str]) -> float:
    """Returns the largest cost of a shape over the cost of a step for which the next smaller sizes are just too small.

    Considers the shapes without the part that only some steps have.
    """
    phase = shapes[0].phase
    alone = [shape for shape in shapes if shape.phase == phase]
    before = {
        axis: dict(zip(values, [0, *values], strict=False))
        for axis in axes
        for values in [sorted({getattr(shape, axis) for shape in alone})]
    }
    least = [
        shape._replace(**{"query_len": 1} | {axis: before[axis][getattr(shape, axis)] + 1 for axis in axes})
        for shape in alone
    ]
    return float((shape_seconds(cost, graph_array(alone)) / shape_seconds(cost, graph_array(least))).max())
