"""How a step's attention is computed, where results are the same in every way and only the time differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_gaudi_ucm.ops.native.library import native
from vllm_gaudi_ucm.ops.triton_support import why_not_triton
from vllm_gaudi_ucm.ops.unified_attention.cost.cost_model import CostModel
from vllm_gaudi_ucm.ops.unified_attention.cost.features import features_of
from vllm_gaudi_ucm.ops.unified_attention.cost.layer_shape import LayerShape
from vllm_gaudi_ucm.ops.unified_attention.cost.passes import Uses, passes_of

SPLITTING = "native"  # the implementation that can leave shared groups unsplit
# More groups than these exist where requests share crosswise; looking at each would take longer than it saves.
MOST_GROUPS = 32
# Another implementation than the first has to be predicted so much faster: each has errors of its own, of up to a tenth
# as measured, while errors of one implementation with and without splitting are mostly the same.
MARGIN = 1.1


class Way(NamedTuple):
    """implementation: by name. unsplit: shared groups whose blocks each request reads for itself; only of `native`."""

    implementation: str
    unsplit: frozenset[int] = frozenset()


def candidates(device_type: str) -> tuple[str, ...]:
    """Implementations that compute true shapes on this type of device, the one of the fixed rule first."""
    if device_type == "cpu":
        return ("cpu", "reference") if native() is None else (SPLITTING, "cpu", "reference")
    if device_type == "cuda" and why_not_triton(device_type) is None:
        return ("cuda", "reference")
    return ("hpu", "reference") if device_type == "hpu" else ("reference",)


def cheapest_way(model: CostModel, uses: Uses, layer: LayerShape, candidates: Sequence[str]) -> Way:
    """The way with the fewest predicted seconds; the first candidate unless another one is faster by MARGIN.

    Another candidate is left out if it was not measured, or not with as large a step; the first is taken where it was
    not measured itself.
    """
    first = candidates[0]
    if first not in model.coefficients:
        return Way(first)
    best = _best_split(model, uses, layer, first)
    least = seconds_of(model, uses, layer, best)
    whole = features_of(uses, passes_of(uses), layer)
    for name in candidates[1:]:
        if name in model.coefficients and model.covers(name, whole):
            way = _best_split(model, uses, layer, name)
            seconds = seconds_of(model, uses, layer, way) * MARGIN
            if seconds < least:
                best, least = way, seconds
    return best


def seconds_of(model: CostModel, uses: Uses, layer: LayerShape, way: Way) -> float:
    """Predicted seconds of all layers of the step."""
    features = features_of(uses, passes_of(uses, way.unsplit), layer)
    return model.seconds(way.implementation, features, layer.layers)


def reads_slice(
    model: CostModel, implementation: str, layer: LayerShape, slice_len: int, in_use: int, block_size: int
) -> bool:
    """Whether unique blocks are read faster as the slice `cache[:slice_len]` than gathered, `in_use` of them.

    slice_len, in_use: blocks. A tie is for gathering, which stages fewer entries.
    """
    gathered = Uses(1, {}, (), in_use, in_use * block_size, False, block_size)
    sliced = gathered._replace(unique_entries=slice_len, is_slice=True)
    way = Way(implementation)
    return seconds_of(model, sliced, layer, way) < seconds_of(model, gathered, layer, way)


def _best_split(model: CostModel, uses: Uses, layer: LayerShape, implementation: str) -> Way:
    """Group by group: the one with the most tokens first, for the others are then seen beside it."""
    way = Way(implementation)
    groups = [index for index, use in enumerate(uses.shared) if len(use.first_rows) > 1]
    if implementation != SPLITTING or not groups or len(groups) > MOST_GROUPS:
        return way
    least = seconds_of(model, uses, layer, way)
    for index in sorted(groups, key=lambda index: -uses.shared[index].tokens):
        tried = Way(implementation, way.unsplit | {index})
        seconds = seconds_of(model, uses, layer, tried)
        if seconds < least:
            way, least = tried, seconds
    return way
