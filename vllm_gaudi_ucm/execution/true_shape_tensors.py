"""The tensors of steps at their true shapes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.batch.row_input import BUILT_IN_INPUTS, RowInputs
from vllm_gaudi_ucm.batch.selection_plan import SelectionPlan
from vllm_gaudi_ucm.execution.attention_group import ONE_GROUP
from vllm_gaudi_ucm.execution.cache_group import CacheGroup
from vllm_gaudi_ucm.execution.group_tensors import step_table
from vllm_gaudi_ucm.execution.step_tensors import (
    Parts,
    StepArrays,
    StepInputs,
    StepTensor,
    input_names,
    of_group,
    true_shape,
)
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits

ContiguousPa = Literal["auto"] | bool

# Reading an unused block costs as much as reading one in use; gathering copies each block once (a read and a write)
# before it is read. So the slice is faster while it covers at most about three blocks for each one in use.
SLICE_READ_LIMIT = 3.0


class TrueShapeTensors:
    """The tensors of steps at their true shapes, each copied separately; on a CPU they are not copied.

    Args:
        contiguous_pa: read the unique blocks as one contiguous slice of the cache (True), gather them by id (False), or
            choose by bytes ("auto"), so that prefix caching and contiguous KV work together.
        choices: sizes of the choices of a sparse method, if one is on.
    """

    def __init__(
        self,
        device: torch.device,
        contiguous_pa: ContiguousPa = "auto",
        choices: SelectionLimits | None = None,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        inputs: RowInputs = BUILT_IN_INPUTS,
    ) -> None:
        self._device = device
        self._is_host = device.type == "cpu"
        self._contiguous_pa = contiguous_pa
        self._choices = choices
        table = step_table(groups, inputs)
        self._groups = tuple(groups)
        self._table = [entry for entry in table if entry.only != "bucket"]
        self._inputs = input_names(table)
        self._entries: dict[Parts, list[StepTensor]] = {}

    def stage(self, planned: PlannedStep) -> tuple[StepInputs, Bucket]:
        plan = planned.plan
        block_ids, unique_blocks = self._unique_blocks(plan)
        choices = None if plan.selection is None else self._room_for(plan.selection)
        shape = true_shape(plan, unique_blocks)
        step = StepArrays(planned, shape.forward, block_ids)
        tensors = {entry.name: self._tensor(entry.at_true_shape(step)) for entry in self._entries_of(step.parts)}
        groups = [
            group.at_true_shape(plan, own, of_group(tensors, number), self._tensor)
            for number, (group, own) in enumerate(zip(self._groups, plan.groups, strict=True))
        ]
        return StepInputs.from_tensors(tensors, groups, choices, self._inputs), shape

    def _entries_of(self, parts: Parts) -> list[StepTensor]:
        found = self._entries.get(parts)
        if found is None:
            found = self._entries[parts] = [e for e in self._table if not set(parts).isdisjoint(e.parts)]
        return found

    def _room_for(self, selection: SelectionPlan) -> SelectionLimits:
        assert self._choices is not None, "a choice without a sparse method"
        longest = int(selection.num_rows.max())
        if longest <= self._choices.max_rows:
            return self._choices
        # a prompt remainder; kernels are compiled for this number, so it takes few values
        return replace(self._choices, max_rows=1 << (longest - 1).bit_length())

    def _unique_blocks(self, plan: UnifiedPlan) -> tuple[NDArray[np.int64] | None, int]:
        """Returns the places of the unique part's entries in a slice of the cache (None if it gathers), and blocks
        read.
        """
        if plan.unique is None:
            return None, 0
        blocks = plan.unique.blocks
        slice_len = int(blocks.max()) + 1
        reads_slice = self._contiguous_pa
        if reads_slice == "auto":
            reads_slice = slice_len <= SLICE_READ_LIMIT * len(blocks)
        return (blocks, slice_len) if reads_slice else (None, len(blocks))

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self._is_host else tensor.to(self._device, non_blocking=True)
