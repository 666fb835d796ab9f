"""Sizes of the selected part, and reaches, of buckets that are chosen without knowing the traffic: rungs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.steps import graph_array, shape_seconds

# A rung is no graph of its own where the rung above costs at most this share more: beside a long prompt the selected
# part is small, whatever its size. At 64 graphs the product of all shapes and four rungs leaves 14 shapes, without the
# needless ones 26 to 35; where steps select a quarter of their contexts the trace mixes then cost a third (modelled).
NEEDLESS = 0.1


def with_rungs(shapes: Iterable[ForwardShape], rungs: Sequence[int], cost: Cost) -> list[ForwardShape]:
    """Every shape at every rung, less the needless ones.

    What selected blocks cost is added to what the rest of a step costs, so the cheapest bucket of a step is the
    cheapest one for its other sizes, at the smallest rung that it has and that is enough.

    Args:
        shapes: without selected blocks.
        rungs: ascending, the first 0; the last one is always kept.
    """
    found: list[ForwardShape] = []
    for shape in shapes:
        # decodes of requests that are not sparse must not pay for those that are
        least = shape.with_selected(0) if "c" not in shape.phase else None
        found += _worth([shape.with_selected(rung) for rung in rungs], cost, least)
    return found


def with_reaches(shapes: Iterable[ForwardShape], reaches: Sequence[int], cost: Cost) -> list[ForwardShape]:
    """Every shape at every reach, less the needless ones; only long steps of prompts have more than one.

    Args:
        reaches: ascending; the last one, which is no bound, is always kept.
    """
    found: list[ForwardShape] = []
    for shape in shapes:
        found += _worth(list(dict.fromkeys(shape.with_reach(reach) for reach in reaches)), cost)
    return found


def _worth(at_rungs: list[ForwardShape], cost: Cost, keep: ForwardShape | None = None) -> list[ForwardShape]:
    """Those that cost less enough than the next one above that is kept."""
    found = []
    seconds = shape_seconds(cost, graph_array(at_rungs)).tolist()
    above = float("inf")
    for each, its_seconds in zip(reversed(at_rungs), reversed(seconds), strict=True):
        if each == keep or above > (1.0 + NEEDLESS) * its_seconds:
            found.append(each)
            above = its_seconds
    return found
