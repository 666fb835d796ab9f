"""The tensors of steps at their true shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import GroupPlan, UnifiedPlan
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.batch.selection_plan import SelectionPlan
from vllm_gaudi_ucm.execution.group_names import Parts, of_group
from vllm_gaudi_ucm.execution.step_tensors import (
    STEP_TENSORS,
    StepArrays,
    StepInputs,
    StepTensor,
    input_names,
    true_shape,
)
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    CausalSlice,
    SharedGroup,
    SharedPart,
    UniquePart,
)
from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionLimits

ContiguousPa = Literal["auto"] | bool

# Reading an unused block costs as much as reading one in use; gathering copies each block once (a read and a
# write) before it is read. So the slice wins while it covers at most about three blocks for each one in use.
SLICE_READ_LIMIT = 3.0


class TrueShapeTensors:
    """The tensors of steps at their true shapes, each copied by itself; on a CPU nothing is copied.

    Args:
        device: where the model runs.
        contiguous_pa: read the unique blocks as one contiguous slice of the cache (True), gather them by id (False), or
            choose by bytes ("auto"), so that prefix caching and contiguous KV work together.
        choices: sizes of the choices of a sparse method, where one is on.
        table: what a step has.
        by_token: entries of the unique part may be few tokens of a block, so that these are counted.
    """

    def __init__(
        self,
        device: torch.device,
        contiguous_pa: ContiguousPa = "auto",
        choices: SelectionLimits | None = None,
        table: Sequence[StepTensor] = STEP_TENSORS,
        *,
        by_token: bool = False,
    ) -> None:
        self._by_token = by_token
        self._device = device
        self._is_host = device.type == "cpu"
        self._contiguous_pa = contiguous_pa
        self._choices = choices
        self._table = [entry for entry in table if entry.only != "bucket"]
        self._inputs = input_names(table)
        self._entries: dict[Parts, list[StepTensor]] = {}

    def stage(self, planned: PlannedStep) -> tuple[StepInputs, Bucket]:
        """The tensors of a step, and its true shape."""
        plan = planned.plan
        block_ids, unique_blocks = self._unique_blocks(plan)
        choices = None if plan.selection is None else self._room_for(plan.selection)
        shape = true_shape(plan, unique_blocks)
        step = StepArrays(planned, shape.forward, block_ids)
        tensors = {entry.name: self._tensor(entry.at_true_shape(step)) for entry in self._entries_of(step.parts)}
        first, *others = (
            self._parts(plan, group, of_group(tensors, number) if number else tensors)
            for number, group in enumerate(plan.groups)
        )
        return StepInputs.of(tensors, first, choices, self._inputs, others), shape

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
        # a prompt remainder; kernels are compiled by this number, so that it has few values
        return replace(self._choices, max_rows=1 << (longest - 1).bit_length())

    def _unique_blocks(self, plan: UnifiedPlan) -> tuple[NDArray[np.int64] | None, int]:
        """Where the entries of the unique part stand in a slice of the cache (None: it gathers), and blocks read."""
        if plan.unique is None:
            return None, 0
        blocks = plan.unique.blocks
        slice_len = int(blocks.max()) + 1
        reads_slice = self._contiguous_pa
        if reads_slice == "auto":
            reads_slice = slice_len <= SLICE_READ_LIMIT * len(blocks)
        return (blocks, slice_len) if reads_slice else (None, len(blocks))

    def _parts(self, plan: UnifiedPlan, group: GroupPlan, tensors: Mapping[str, torch.Tensor]) -> AttentionParts:
        """The parts of one KV-cache group. tensors: of the group, by their plain names."""
        causal = shared = unique = None
        if group.causal is not None:
            slices = tuple(CausalSlice(*bounds) for bounds in group.causal.slices)
            causal = CausalPart(tensors["groups"], slices, first_rows=self._of_rows(group.causal.first_rows))
        if group.shared is not None:
            groups = tuple(SharedGroup(self._tensor(rows), lo, hi) for rows, lo, hi in group.shared.groups)
            ranges = tensors["shared_lo"], tensors["shared_hi"]
            shared = SharedPart(
                tensors["shared_blocks"],
                tensors["row_spans"],
                *ranges,
                groups,
                rise=self._of_rows(group.shared.rise),
                most_of_span=group.shared.most_of_request,
            )
        if group.unique is not None:
            ranges = tensors["unique_lo"], tensors["unique_hi"]
            count = int((group.unique.hi - group.unique.lo).sum()) if self._by_token else None
            blocks, rows = tensors.get("unique_blocks"), tensors["unique_rows"]
            most = int(np.bincount(group.unique.rows).max(initial=0))
            unique = UniquePart(blocks, rows, *ranges, plan.num_single, num_tokens=count, most_of_row=most)
        return AttentionParts(causal, shared, unique, positions=tensors["positions"])

    def _of_rows(self, array: NDArray[np.int64] | None) -> torch.Tensor | None:
        return None if array is None else self._tensor(array)

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self._is_host else tensor.to(self._device, non_blocking=True)
