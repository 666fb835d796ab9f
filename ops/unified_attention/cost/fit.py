"""Measures the ways of computing attention on a device and fits the model of their cost: some seconds, once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.cost.cost_model import CostModel, Sample
from vllm_gaudi_ucm.ops.unified_attention.cost.features import features_of
from vllm_gaudi_ucm.ops.unified_attention.cost.grid import (
    GEOMETRIES,
    GPU_GEOMETRIES,
    Geometry,
    Step,
    blocks_of,
    make_parts,
    steps_of,
)
from vllm_gaudi_ucm.ops.unified_attention.cost.grid_tensors import make_cache, on_device
from vllm_gaudi_ucm.ops.unified_attention.cost.layer_shape import LayerShape
from vllm_gaudi_ucm.ops.unified_attention.cost.passes import Uses, passes_of, uses_of
from vllm_gaudi_ucm.ops.unified_attention.cost.way import SPLITTING, Way, candidates
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts

REPEATS = 5
HOPELESS = 6.0  # a way that took so many times as long as the fastest is not measured again
# (row, token) pairs beyond which the reference is not measured: it takes many times as long, and its cost is known then
REFERENCE_PAIRS = 40000


@dataclass
class Measured:
    """A step of the grid: for each way, all samples of the seconds of a layer and of what is derived for all layers.

    What else runs on a machine only ever adds to them, so the least of the samples is taken.
    """

    step: Step
    shape: LayerShape
    uses: Uses
    layer_seconds: dict[Way, list[float]] = field(default_factory=dict)
    step_seconds: dict[Way, list[float]] = field(default_factory=dict)

    def seconds(self, way: Way) -> float:
        """Of a layer, with its share of what was derived for the step."""
        return min(self.layer_seconds[way]) + min(self.step_seconds[way]) / self.shape.layers

    def samples(self) -> list[Sample]:
        """One for each way."""
        return [
            Sample(
                way.implementation,
                features_of(self.uses, passes_of(self.uses, way.unsplit), self.shape),
                min(seconds),
                min(self.step_seconds[way]),
            )
            for way, seconds in self.layer_seconds.items()
        ]


def fit(measured: Sequence[Measured]) -> CostModel:
    """The model of what was measured."""
    return CostModel.fit([sample for one in measured for sample in one.samples()])


def measure(
    device: torch.device,
    progress: Callable[[float], None] = lambda done: None,
    geometries: Sequence[Geometry] | None = None,
    repeats: int = REPEATS,
) -> list[Measured]:
    """Measures the grid; the ways of a step are interleaved. progress: called with the fraction that is done.

    geometries: default: those that fit the type of device.
    """
    if geometries is None:
        geometries = GPU_GEOMETRIES if device.type == "cuda" else GEOMETRIES
    work = [(geometry, step) for geometry in geometries for step in steps_of(geometry, slices=True)]
    random = torch.Generator().manual_seed(0)
    caches: dict[Geometry, Tensor] = {}
    result = []
    for index, (geometry, step) in enumerate(work):
        if geometry not in caches:
            blocks = max(blocks_of(some, geometry.block_size) for one, some in work if one == geometry)
            caches = {geometry: make_cache(geometry, blocks, device)}
        result.append(measure_step(geometry, step, caches[geometry], random, repeats))
        progress((index + 1) / len(work))
    return result


def measure_step(geometry: Geometry, step: Step, cache: Tensor, random: torch.Generator, repeats: int) -> Measured:
    """One step, in every way. cache: as `make_cache` makes it, of enough blocks."""
    parts = make_parts(step, geometry.block_size, random)
    shape = LayerShape(
        geometry.heads, geometry.kv_heads, geometry.dim, geometry.dim, cache.element_size(), geometry.layers
    )
    parts = on_device(parts, cache.device)
    result = Measured(step, shape, uses_of(parts, geometry.block_size))
    rows = step.decodes + step.chunks * step.new
    query = torch.randn(rows, geometry.heads, geometry.dim, generator=random).to(cache.device)
    key = query[:, : geometry.kv_heads].contiguous()
    if cache.device.type != "cpu":
        query, key = query.to(cache.dtype), key.to(cache.dtype)
    return _measure_ways(result, parts, (query, key), cache, geometry.block_size, repeats)


def ways_of(uses: Uses, device_type: str) -> list[Way]:
    """Every implementation; where requests share, also all groups unsplit."""
    names = candidates(device_type)
    pairs = uses.unique_tokens + sum(use.rows * use.tokens for use in uses.shared)
    pairs += sum(rows * rows for rows in uses.chunks.values())
    ways = [Way(name) for name in names if name != "reference" or len(names) == 1 or pairs <= REFERENCE_PAIRS]
    groups = frozenset(index for index, use in enumerate(uses.shared) if len(use.first_rows) > 1)
    return ways + [Way(way.implementation, groups) for way in ways if groups and way.implementation == SPLITTING]


def _measure_ways(
    result: Measured, parts: AttentionParts, rows: tuple[Tensor, Tensor], cache: Tensor, block_size: int, repeats: int
) -> Measured:
    query, key = rows
    device, scale = cache.device, result.shape.dim**-0.5
    ways = ways_of(result.uses, device.type)

    def run(way: Way, *, kept: bool) -> None:
        start = _now(device)
        ready = prepare(parts, block_size, implementation=way.implementation, unsplit=way.unsplit)
        prepared = _now(device)
        # the first call also makes room for what the others use again
        for _ in range(2 if kept else 1):
            begin = _now(device)
            unified_attention(query, key, key, cache[0], cache[1], ready, scale)
            seconds = _now(device) - begin
        result.layer_seconds.setdefault(way, []).append(seconds)
        result.step_seconds.setdefault(way, []).append(prepared - start)

    for way in ways:
        run(way, kept=False)
    if device.type != "cpu":
        # these samples hold the compilation of kernels
        result.layer_seconds.clear()
        result.step_seconds.clear()
        for way in ways:
            run(way, kept=True)
    least = min(seconds[0] for seconds in result.layer_seconds.values())
    ways = [way for way in ways if result.layer_seconds[way][0] <= HOPELESS * least]
    for _ in range(repeats):
        for way in ways:
            run(way, kept=True)
    return result


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
