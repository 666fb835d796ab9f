"""Plan to tensors: everything a step's model forward reads, on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import CausalPlan, SharedPlan, UnifiedPlan, UniquePlan
from vllm_gaudi_ucm.batch.row_tiles import row_tiles
from vllm_gaudi_ucm.batch.selection_plan import SelectionPlan
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, phase_string
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES, is_bounded
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    CausalSlice,
    SharedGroup,
    SharedPart,
    UniquePart,
)
from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionLimits
from vllm_gaudi_ucm.sparse.selection.selection_tensors import SelectionTensors, selection_arrays

ContiguousPa = Literal["auto"] | bool

# Reading a block that nobody uses costs as much as reading one in use; gathering copies each block once (a read and a
# write) before it is read. So the slice wins while it covers at most about three blocks for each one in use.
SLICE_READ_LIMIT = 3.0


@dataclass(frozen=True)
class StagedStep:
    """Tensors of one step. Rows are query tokens in flat order.

    token_ids, positions, slots: int64 [rows].
    bucket: the step's true shape.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    parts: AttentionParts
    bucket: Bucket
    selection: SelectionTensors | None = None


def true_shape(plan: UnifiedPlan, unique_blocks: int) -> Bucket:
    """The bucket of a step before any padding; `unique_blocks` counts those that are read, in use or not."""
    return Bucket(
        phase=phase_string(plan.causal is not None, plan.shared is not None, plan.unique is not None),
        query_len=plan.num_rows,
        shared_blocks=0 if plan.shared is None else len(plan.shared.blocks),
        unique_blocks=unique_blocks,
        logits=len(plan.logits_rows),
        selected_blocks=0 if plan.selection is None else len(plan.selection.choice_spans),
        causal_reach=_reach(plan),
    )


def _reach(plan: UnifiedPlan) -> int:
    """The least of a bucket that holds the step, where that says more than its number of rows."""
    if plan.causal is None or not is_bounded(plan.num_rows, 1):
        return ALL_TILES
    reach = row_tiles(plan).reach
    return reach if is_bounded(plan.num_rows, reach) else ALL_TILES


class Staging:
    """Turns plans into tensors on one device.

    Args:
        device: where the model runs.
        contiguous_pa: read the unique blocks as one contiguous slice of the cache (True), gather them by id (False), or
            choose by bytes ("auto"), so that prefix caching and contiguous KV work together.
        limits: of choices, where a sparse method is on.
    """

    def __init__(
        self,
        device: torch.device,
        contiguous_pa: ContiguousPa = "auto",
        limits: SelectionLimits | None = None,
    ) -> None:
        self._device = device
        self._limits = limits
        self._contiguous_pa = contiguous_pa

    def stage(self, plan: UnifiedPlan, token_ids: NDArray[np.int64]) -> StagedStep:
        unique = None if plan.unique is None else self._unique(plan.unique, plan.num_single)
        selection = None if plan.selection is None else self._selection(plan.selection)
        parts = AttentionParts(
            causal=None if plan.causal is None else self._causal(plan.causal),
            shared=None if plan.shared is None else self._shared(plan.shared, plan.row_requests),
            unique=unique,
            selected=None if selection is None else selection.chosen_part(),
        )
        return StagedStep(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(plan.positions),
            slots=self._tensor(plan.slots),
            parts=parts,
            bucket=true_shape(plan, 0 if unique is None else len(unique.rows)),
            selection=selection,
        )

    def blocks(self, blocks: NDArray[np.int64]) -> torch.Tensor:
        """Block ids on the device."""
        return self._tensor(blocks)

    def _selection(self, plan: SelectionPlan) -> SelectionTensors:
        assert self._limits is not None, "a choice without a sparse method"
        limits, longest = self._limits, int(plan.num_rows.max())
        if longest > limits.max_rows:
            # what is left of a prompt; kernels are compiled by this number, so that it has few values
            limits = replace(limits, max_rows=1 << (longest - 1).bit_length())
        arrays = selection_arrays(plan, limits)
        return SelectionTensors.of({name: self._tensor(array) for name, array in arrays.items()}, limits)

    def _causal(self, plan: CausalPlan) -> CausalPart:
        return CausalPart(self._tensor(plan.groups), tuple(CausalSlice(*bounds) for bounds in plan.slices))

    def _shared(self, plan: SharedPlan, row_requests: NDArray[np.int64]) -> SharedPart:
        return SharedPart(
            blocks=self._tensor(plan.blocks),
            row_spans=self._tensor(row_requests),
            lo=self._tensor(plan.lo),
            hi=self._tensor(plan.hi),
            groups=tuple(SharedGroup(self._tensor(rows), lo, hi) for rows, lo, hi in plan.groups),
        )

    def _unique(self, plan: UniquePlan, num_single: int) -> UniquePart:
        slice_len = int(plan.blocks.max()) + 1
        if not self._reads_slice(slice_len, len(plan.blocks)):
            blocks, rows, lo, hi = (self._tensor(array) for array in plan)
            return UniquePart(blocks, rows, lo, hi, num_single)
        # a block of the slice that nobody uses keeps an empty range
        by_block = [np.zeros(slice_len, array.dtype) for array in (plan.rows, plan.lo, plan.hi)]
        for whole, used in zip(by_block, (plan.rows, plan.lo, plan.hi), strict=True):
            whole[plan.blocks] = used
        rows, lo, hi = (self._tensor(array) for array in by_block)
        return UniquePart(None, rows, lo, hi, num_single)

    def _reads_slice(self, slice_len: int, in_use: int) -> bool:
        if self._contiguous_pa == "auto":
            return slice_len <= SLICE_READ_LIMIT * in_use
        return self._contiguous_pa

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
