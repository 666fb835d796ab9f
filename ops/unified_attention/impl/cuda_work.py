"""What a part of the step launches, where its programs leave what they find, and parts that run side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_layer import Layer
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_plan import Plan

_threads = threading.local()


class Found(NamedTuple):
    """What the programs of a part find: acc, top, total of [programs + lists, rows, heads], fp32.

    place: int32 [rows of the step] list * rows of a list + lane, or -1. offsets: int32 [lists + 1].
    """

    part: str
    place: Tensor
    acc: Tensor
    top: Tensor
    total: Tensor
    offsets: Tensor
    programs: int
    rows: int


class Work(NamedTuple):
    """A launch, and where the result of it will be; None: in the step's own result."""

    launch: Callable[[], None]
    found: Found | None


def room_for(layer: Layer, plan: Plan, part: str, place: Tensor, offsets: Tensor, programs: int, rows: int) -> Found:
    """Scratch for a part whose lists have `rows` rows each."""
    size = (programs + offsets.shape[0] - 1) * rows * layer.heads
    acc = scratch(layer, plan, f"{part} acc", size * layer.value_dim)
    top, total = (scratch(layer, plan, f"{part} {name}", size) for name in ("top", "total"))
    return Found(part, place, acc, top, total, offsets, programs, rows)


def scratch(layer: Layer, plan: Plan, name: str, size: int) -> Tensor:
    """fp32, at least `size` elements of any contents, kept from layer to layer."""
    kept = plan.scratch.get(name)
    if kept is None or kept.numel() < size:
        kept = plan.scratch[name] = torch.empty(size, dtype=torch.float32, device=layer.query.device)
    return kept


def run_side_by_side(work: Sequence[Work], device: torch.device) -> None:
    """Launches all: the first on the current stream, the others beside it; what comes next waits for all.

    One part is bound by memory, another by arithmetic: together they take little more than the longer of them. While a
    graph is captured its branches are captured so.
    """
    if device.type != "cuda" or len(work) == 1:
        for one in work:
            one.launch()
        return
    current = torch.cuda.current_stream(device)
    streams = _side_streams(device)[: len(work) - 1]
    for one, stream in zip(work[1:], streams, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            one.launch()
    work[0].launch()
    for stream in streams:
        current.wait_stream(stream)


def _side_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Of this thread: a graph that another thread captures must not get what this one launches."""
    streams: dict[torch.device, list[torch.cuda.Stream]] | None = getattr(_threads, "streams", None)
    if streams is None:
        streams = _threads.streams = {}
    if device not in streams:
        streams[device] = [torch.cuda.Stream(device) for _ in range(3)]
    return streams[device]
