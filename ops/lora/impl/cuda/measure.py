"""Measures on this GPU where the first product of adapters is computed fastest: `ways.py`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cuda.graph_time import graph_seconds
from vllm_gaudi_ucm.ops.cuda.side_by_side import compiled_side_by_side
from vllm_gaudi_ucm.ops.lora.impl.cuda.tiles import RowTiles, group_rows
from vllm_gaudi_ucm.ops.lora.impl.cuda.ways import MEASURED_ROWS, Times, Way
from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights

logger = logging.getLogger(__name__)

Layer = Callable[[Tensor, Tensor, RowTiles, AdapterWeights, Way], object]
"""Computes a layer with adapters one way. Takes the weight of its own product, rows, their tiles, and adapters."""

# Layers in a graph, and the bytes of their weights, which no cache holds.
CALLS, BYTES = 16, 256 << 20


def measure_ways(like: AdapterWeights, layer: Layer) -> Times:
    """Measures captured layers of the sizes of `like`. Rows take its slots in turn."""
    device, dtype, (_, inputs) = like.down.device, like.down.dtype, like.down.shape
    size = len(like.up) * inputs * dtype.itemsize
    ways, layers = [way for way in Way if way is not Way.JOINED or like.joined is not None], []
    for _ in range(max(1, min(CALLS, BYTES // size))):
        own = torch.zeros(len(like.up), inputs, dtype=dtype, device=device)
        weights = AdapterWeights.joined_with(own, like.outputs, like.slots, like.rank)
        layers.append((weights.own, weights))
    steps = []
    for rows in MEASURED_ROWS:
        tiles = group_rows(torch.arange(rows, device=device) % like.slots, like.slots)
        steps.append((torch.zeros(rows, inputs, dtype=dtype, device=device), tiles))

    def run(way: Way, x: Tensor, tiles: RowTiles, calls: int = CALLS) -> None:
        for number in range(calls):
            own, weights = layers[number % len(layers)]
            layer(own, x, tiles, weights, way)

    with compiled_side_by_side():
        for step in steps:
            for way in ways:
                run(way, *step, calls=1)
    # one stream, because each that multiplies keeps a workspace
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    times = {way: tuple(graph_seconds(partial(run, way, *step), stream) / CALLS for step in steps) for way in ways}
    for rows, *found in zip(MEASURED_ROWS, *times.values(), strict=True):
        each = ", ".join(f"{way} {1e6 * time:.1f} us" for way, time in zip(times, found, strict=True))
        logger.info("A layer of %d to %d with adapters, %d rows: %s", inputs, len(like.up), rows, each)
    return times
