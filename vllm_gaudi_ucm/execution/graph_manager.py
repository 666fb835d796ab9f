"""Forward graphs of one kind: their static input tensors, the choice of a step's graph, and the replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.row_input import BUILT_IN_INPUTS, RowInputs
from vllm_gaudi_ucm.execution.attention_group import ONE_GROUP
from vllm_gaudi_ucm.execution.group_tensors import step_table
from vllm_gaudi_ucm.execution.step_sizes import Sizes
from vllm_gaudi_ucm.execution.step_tensors import (
    Parts,
    StepArrays,
    StepInputs,
    StepTensor,
    input_names,
    of_group,
)
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape, phase_string

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.planned_step import PlannedStep
    from vllm_gaudi_ucm.execution.cache_group import CacheGroup
    from vllm_gaudi_ucm.graphs.runners.base import GraphRunner, Replay, StaticFunction
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits

Stage = Callable[[str], AbstractContextManager[object]]
"""A region of device work that becomes one recipe; the label names it in reports. `nullcontext` if recipes are not
cut.
"""

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a region of a function of tensors: compiled once for each set of their shapes, and for no other number."""


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function unchanged, for devices and modes without compilation."""
    return function


Pad = int | NDArray[np.int64]

Places = tuple[tuple[int, int, tuple[int, ...]], ...]
"""The (start, stop, shape) of each tensor in a flat one."""


def cut_views(flat: torch.Tensor, places: Places) -> list[torch.Tensor]:
    """Returns the tensors in a flat one, as views of it."""
    pieces = ((flat[start:stop], shape) for start, stop, shape in places)
    return [piece if len(shape) == 1 else piece.view(shape) for piece, shape in pieces]  # dynamo traces each view


def cut_copies(flat: torch.Tensor, places: Places) -> list[torch.Tensor]:
    """Returns the tensors in a flat one, as separate tensors.

    Gaudi's bridge also looks up a compiled region by the storage offsets of its inputs: pieces of one tensor would need
    another recipe whenever an offset differs, and a write to one of them might be dropped.
    """
    return [tensor.clone() for tensor in cut_views(flat, places)]


# Entries of 8 bytes: Triton compiles another kernel for a pointer that is not a multiple of 16.
ALIGNED = 2


class _Layout:
    """The layout of a forward shape's tensors in its flat tensor: `names` and `places`.

    host: int64 [at least size], the array to which a step is written.
    """

    def __init__(self, table: Sequence[StepTensor], sizes: Sizes, host: NDArray[np.int64] | None = None) -> None:
        self.names: list[str] = []
        places = []
        self.size = 0
        self._arrays: list[tuple[StepTensor, NDArray[np.int64], Pad]] = []
        self._written: dict[Parts, list[tuple[StepTensor, NDArray[np.int64], Pad]]] = {}
        self._host = host
        gaps: list[int] = []
        for entry in table:
            shape = entry.size(sizes)
            if shape is None:
                continue
            place = slice(self.size, self.size + math.prod(shape))
            self.size = -(-place.stop // ALIGNED) * ALIGNED
            gaps += range(place.stop, self.size)
            self.names.append(entry.name)
            places.append((place.start, place.stop, shape))
            if host is not None:
                pad = entry.pad(sizes) if callable(entry.pad) else entry.pad
                self._arrays.append((entry, host[place].reshape(shape), pad))
        self.places: Places = tuple(places)
        self._gaps = np.array(gaps, np.int64)

    def fill(self, step: StepArrays) -> None:
        """Writes a step and its pads."""
        parts = step.parts
        written = self._written.get(parts)
        if written is None:
            of_step = set(parts)
            written = [item for item in self._arrays if not of_step.isdisjoint(item[0].parts)]
            self._written[parts] = written
        if len(written) < len(self._arrays):
            self.fill_pads(parts)
        for entry, whole, pad in written:
            entry.fill(whole, step, pad)
        self._fill_gaps()

    def fill_pads(self, parts: Parts = ()) -> None:
        """Writes the pads of all tensors except those of `parts`."""
        of_step = set(parts)
        for entry, whole, pad in self._arrays:
            if of_step.isdisjoint(entry.parts):
                whole[...] = pad
        self._fill_gaps()

    def _fill_gaps(self) -> None:
        """Zeroes the gaps: they are never read, but a step then has the same bits whatever ran before."""
        if self._host is not None:
            self._host[self._gaps] = 0


class _HostBuffer:
    """A host buffer to which a step is written, and from which it is copied.

    A copy from pinned memory is queued after the pending work of the device, and the host continues.

    size: int64 entries. pinned: whether it is page-locked for `device`; a copy from other memory returns when it has
    ended.
    """

    def __init__(self, size: int, device: torch.device, pinned: bool) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self.array: NDArray[np.int64] = self.tensor.numpy()
        self.layouts: dict[ForwardShape, _Layout] = {}
        self._copied = torch.Event(device) if pinned else None

    def await_copy(self) -> None:
        """Waits for the last copy; must be called before the buffer is written."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy_to(self, flat: torch.Tensor) -> None:
        """Copies the first entries, as many as `flat` has."""
        flat.copy_(self.tensor[: len(flat)], non_blocking=self._copied is not None)
        if self._copied is not None:
            self._copied.record()


class _HostBuffers:
    """Buffers that take turns, and the tensors on the device to which they are copied, by key.

    A step is written while the copy of the previous one is still queued. One buffer is enough if the host waits for
    each copy.
    """

    def __init__(self, size: int, device: torch.device, pinned: bool) -> None:
        self.all = [_HostBuffer(size, device, pinned) for _ in range(2 if pinned else 1)]
        self._device = device
        self._flat: dict[ForwardShape | int, torch.Tensor] = {}

    def next(self) -> _HostBuffer:
        """Returns the buffer that was copied longest ago; it may be written."""
        buffer = self.all.pop(0)
        self.all.append(buffer)
        buffer.await_copy()
        return buffer

    def copy(self, buffer: _HostBuffer, key: ForwardShape | int, size: int) -> torch.Tensor:
        """Copies the first `size` entries of a buffer to the tensor of this key, and returns the tensor."""
        flat = self._flat.get(key)
        if flat is None:
            flat = self._flat[key] = torch.zeros(size, dtype=torch.int64, device=self._device)
        buffer.copy_to(flat)
        return flat

    def refill(self) -> None:
        """Zeroes the tensors on the device."""
        for flat in self._flat.values():
            flat.zero_()


class LogitsRows:
    """Rows of the step that ran last whose logits are computed: a device tensor for each number of them.

    Args:
        most: most rows of a step.
        pin_memory: see BucketTensors.
    """

    def __init__(self, most: int, device: torch.device, pin_memory: bool = False) -> None:
        self._buffers = _HostBuffers(most, device, pin_memory)

    def fill(self, logits: int, rows: NDArray[np.int64]) -> torch.Tensor:
        """Returns int64 [logits]: the rows, at most `logits`; pads repeat row 0."""
        buffer = self._buffers.next()
        buffer.array[: len(rows)] = rows
        buffer.array[len(rows) : logits] = 0
        return self._buffers.copy(buffer, logits, logits)

    def refill(self) -> None:
        """Fills every tensor on the device again, after a warm-up that computed nothing."""
        self._buffers.refill()


class BucketTensors:
    """Host buffers for all shapes, and a flat device tensor per forward shape.

    A step fills the whole tensor of its bucket: real values first, then pads, which refer to the dummy block, to no
    group and to an entry that sees nothing, so values of earlier steps are never read. A graph gets the flat tensor and
    cuts it itself (`split`): copying into a part of a larger tensor would be a separate recipe on Gaudi.

    A copy from a pinned buffer is queued after the pending work of the device: the graph of the previous step, if the
    host has not waited for it (async scheduling, prompt chunks that yield no token). So buffers take turns, and none is
    written before its last copy has ended.

    Args:
        limits: limits of the steps; `contiguous` decides whether the unique part reads a slice of the cache or gathers.
        causal_slice: rows per slice of the causal part.
        pin_memory: whether host buffers are pinned, so that the host continues while they are copied.
        choices: sizes of the choices of a sparse method, if one is on.
        cut: `cut_views`, or `cut_copies` as a compiled region.
    """

    def __init__(
        self,
        limits: Limits,
        causal_slice: int,
        device: torch.device,
        pin_memory: bool = False,
        choices: SelectionLimits | None = None,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        inputs: RowInputs = BUILT_IN_INPUTS,
        cut: Callable[[torch.Tensor, Places], list[torch.Tensor]] = cut_views,
    ) -> None:
        self._cut = cut
        self._limits = limits
        self._choices = choices
        self._groups = [group.in_buckets(k, limits, causal_slice, device) for k, group in enumerate(groups)]
        table = step_table(groups, inputs)
        self._table = [entry for entry in table if entry.only != "true shape"]
        self._inputs = input_names(table)
        largest = Sizes(limits.maximum.forward.with_prompt_tiles(1), limits, choices)
        size = _Layout(self._table, largest).size
        self._steps = _HostBuffers(size, device, pin_memory)

    def fill(self, shape: ForwardShape, step: PlannedStep) -> torch.Tensor:
        """Copies a step into the flat tensor of its bucket's shape, which must dominate it; returns the flat tensor."""
        unique = step.plan.unique
        block_ids = unique.blocks if self._limits.contiguous and unique is not None else None
        buffer = self._steps.next()
        layout = self._layout(shape, buffer)
        layout.fill(StepArrays(step, shape, block_ids))
        return self._steps.copy(buffer, shape, layout.size)

    def fill_pads(self, shape: ForwardShape) -> torch.Tensor:
        """Returns the flat tensor of a shape with only pads: warm-up does not change the cache of any request."""
        buffer = self._steps.next()
        layout = self._layout(shape, buffer)
        layout.fill_pads()
        return self._steps.copy(buffer, shape, layout.size)

    def split(self, flat: torch.Tensor, shape: ForwardShape) -> StepInputs:
        """Returns the tensors in a flat one. Raises ValueError if their phase differs from the phase of the shape."""
        layout = self._layout(shape, self._steps.all[0])
        tensors = dict(zip(layout.names, self._cut(flat, layout.places), strict=True))
        groups = [group.make_inputs(shape, of_group(tensors, k)) for k, group in enumerate(self._groups)]
        phase = phase_string(*(part is not None for part in groups[0].parts[:3]))
        if phase != shape.phase:
            raise ValueError(f"bucket {list(shape)}: its tensors make the phase {phase!r}")
        choices = self._choices if shape.selected_blocks else None
        return StepInputs.from_tensors(tensors, groups, choices, self._inputs)

    def refill(self) -> None:
        """Fills every tensor on the device again, after a warm-up that computed nothing."""
        for group in self._groups:
            group.refill()
        self._steps.refill()

    def _layout(self, shape: ForwardShape, buffer: _HostBuffer) -> _Layout:
        found = buffer.layouts.get(shape)
        if found is None:
            sizes = Sizes(shape, self._limits, self._choices)
            found = buffer.layouts[shape] = _Layout(self._table, sizes, buffer.array)
        return found


class ForwardGraphs:
    """Forward graphs by shape. Kinds differ in the room of their inputs; one shape may have a graph in each kind.

    Args:
        stage: context around device work.
    """

    def __init__(
        self,
        inputs: BucketTensors,
        make_runner: Callable[[StaticFunction], GraphRunner],
        compute: Callable[[StepInputs], None],
        stage: Stage,
    ) -> None:
        self.inputs = inputs
        self._compute = compute
        self._stage = stage
        self._runner = make_runner(self._run)
        self._graphs: dict[ForwardShape, Replay] = {}
        self._staged: ForwardShape

    def fill(self, shape: ForwardShape, step: PlannedStep) -> None:
        """Copies a step, padded to the bucket of this shape, to the device. See BucketTensors."""
        self.inputs.fill(shape, step)
        self._staged = shape

    def replay(self) -> None:
        """Replays the graph of the last filled step. Raises KeyError, and runs nothing, for a shape not warmed."""
        graph = self._graphs[self._staged]
        with self._stage("forward"):
            graph()

    def replay_pads(self, shape: ForwardShape) -> None:
        """Replays an existing graph over pads, which read and write only the dummy block."""
        self.inputs.fill_pads(shape)
        self._staged = shape
        self.replay()

    def warm(self, shape: ForwardShape) -> None:
        if shape in self._graphs:
            self.replay_pads(shape)
            return
        flat = self.inputs.fill_pads(shape)
        with self._stage("forward"):
            self._graphs[shape] = self._runner.capture((flat, shape))

    def captured(self) -> int:
        return len(self._graphs)

    def _run(self, flat: torch.Tensor, shape: ForwardShape) -> None:
        self._compute(self.inputs.split(flat, shape))
