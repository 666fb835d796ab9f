"""Launches of the parts of a layer, the places of their partial results, and the streams that they run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cuda.side_streams import side_streams
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.layer import Layer
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import CudaPlan


class Found(NamedTuple):
    """Partial results of the programs of a part: acc, top, total, fp32 [programs + lists, rows, heads].

    units: units of an entry that programs share evenly.
    place: int32 [rows of the step]: list * rows per list + lane, or -1. offsets: int32 [lists + 1].
    """

    part: str
    place: Tensor
    acc: Tensor
    top: Tensor
    total: Tensor
    offsets: Tensor
    programs: int
    rows: int
    units: int = 1


class Work(NamedTuple):
    """A launch, and the place of its partial results; None if it writes to the result of the step.

    small: it does not fill a GPU.
    """

    launch: Callable[[], None]
    found: Found | None
    small: bool = False


def room_for(
    layer: Layer, plan: CudaPlan, part: str, place: Tensor, offsets: Tensor, programs: int, rows: int
) -> Found:
    """Returns scratch memory for a part whose lists have `rows` rows each."""
    size = (programs + offsets.shape[0] - 1) * rows * layer.heads
    acc = scratch(layer, plan, f"{part} acc", size * layer.value_dim)
    top, total = (scratch(layer, plan, f"{part} {name}", size) for name in ("top", "total"))
    return Found(part, place, acc, top, total, offsets, programs, rows)


def scratch(layer: Layer, plan: CudaPlan, name: str, size: int) -> Tensor:
    """Uninitialised fp32 memory of at least `size` elements, reused by all layers."""
    kept = plan.scratch.get(name)
    if kept is None or kept.numel() < size:
        kept = plan.scratch[name] = torch.empty(size, dtype=torch.float32, device=layer.query.device)
    return kept


def run_side_by_side(work: Sequence[Work], device: torch.device) -> None:
    """Launches all in parallel, the first on the current stream; later work waits for all of them.

    If memory limits one part and arithmetic another, together they take little longer than the slower one. A captured
    graph gets parallel branches. Small launches go ahead of those that fill the GPU, behind which they would find no
    room.
    """
    if device.type != "cuda" or len(work) == 1:
        for one in work:
            one.launch()
        return
    current = torch.cuda.current_stream(device)
    sides = side_streams(device)
    streams = [(sides.ahead if one.small else sides.equal)[index] for index, one in enumerate(work[1:])]
    for one, stream in zip(work[1:], streams, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            one.launch()
    work[0].launch()
    for stream in streams:
        current.wait_stream(stream)
