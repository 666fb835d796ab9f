"""How a step's attention is computed, where results are the same in every way and only the time differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_gaudi_ucm.ops.native.library import native
from vllm_gaudi_ucm.ops.triton_support import why_not_triton
from vllm_gaudi_ucm.ops.unified_attention.cost.cost_model import CostModel
from vllm_gaudi_ucm.ops.unified_attention.cost.features import Features, features_of
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
    whole = features_of(uses, passes_of(uses), layer)  # split, which only `native` need not do
    least, best = _best_split(model, uses, layer, whole, first)
    for name in candidates[1:]:
        if name in model.coefficients and model.covers(name, whole):
            seconds, way = _best_split(model, uses, layer, whole, name)
            if seconds * MARGIN < least:
                least, best = seconds * MARGIN, way
    return best


def seconds_of(model: CostModel, uses: Uses, layer: LayerShape, way: Way) -> float:
    """Predicted seconds of all layers of the step."""
    features = features_of(uses, passes_of(uses, way.unsplit), layer)
    return model.seconds(way.implementation, features, layer.layers)


def reads_slice(
    model: CostModel, implementation: str, layer: LayerShape, slice_len: int, in_use: int, block_size: int
) -> bool:
    """Whether unique blocks are read faster as the slice `cache[:slice_len]` than gathered, `in_use` of them.

    slice_len, in_use: blocks. A tie is for gathering, which stages fewer entries. KeyError for an implementation that
    was not measured.
    """
    # the other features do not depend on it, so only what differs is looked up: this is asked in every step
    numbers = block_size * layer.kv_heads * layer.width * layer.layers
    sliced, gathered, entries = (
        model.coefficient(implementation, name) for name in ("layer.sliced", "layer.gathered", "step.entries")
    )
    return slice_len * (sliced * numbers + entries) < in_use * (gathered * numbers + entries)


def _best_split(
    model: CostModel, uses: Uses, layer: LayerShape, whole: Features, implementation: str
) -> tuple[float, Way]:
    """Group by group: the one with the most tokens first, for the others are then seen beside it. whole: all split."""
    way = Way(implementation)
    least = model.seconds(implementation, whole, layer.layers)
    groups = [index for index, use in enumerate(uses.shared) if len(use.first_rows) > 1]
    if implementation != SPLITTING or len(groups) > MOST_GROUPS:
        return least, way
    for index in sorted(groups, key=lambda index: -uses.shared[index].tokens):
        tried = Way(implementation, way.unsplit | {index})
        seconds = seconds_of(model, uses, layer, tried)
        if seconds < least:
            least, way = seconds, tried
    return least, way
