"""What a step leaves behind in the phase log: its shape, its attention work and where its time went."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import CausalPlan, SharedPlan, UnifiedPlan
from vllm_gaudi_ucm.batch.selection_plan import SelectionPlan
from vllm_gaudi_ucm.execution.execution import StepShape
from vllm_gaudi_ucm.observability.phase_log import StepRecord


class StepClock:
    """Times the three stages of one step on the host's clock, in milliseconds."""

    def __init__(self) -> None:
        self._marks = [time.perf_counter()]

    def skip(self, seconds: float) -> None:
        """So long something ran that is no part of the step's stages."""
        self._marks[-1] += seconds

    def planned(self) -> None:
        self._marks.append(time.perf_counter())

    computed = planned

    def sampled(self, took_part: bool = True) -> None:
        """The end; a division of a step that others followed took no part in sampling."""
        self._marks.append(time.perf_counter() if took_part else self._marks[-1])

    def record(self, step: int, plan: UnifiedPlan, shape: StepShape, block_size: int) -> StepRecord:
        """block_size: tokens of a block, which a selected block has all of."""
        plan_ms, forward_ms, sample_ms = (1e3 * np.diff(self._marks)).tolist()
        return StepRecord(
            step=step,
            bucket=shape.true,
            padded=shape.padded,
            requests=len(plan.requests),
            prompts=len(plan.requests) - plan.num_single,
            tokens=plan.num_rows,
            causal_pairs=_causal_pairs(plan.causal),
            shared_pairs=_shared_pairs(plan.shared, plan.row_requests),
            unique_pairs=0 if plan.unique is None else int((plan.unique.hi - plan.unique.lo).sum()),
            plan_ms=plan_ms,
            forward_ms=forward_ms,
            sample_ms=sample_ms,
            selected_pairs=_selected_pairs(plan.selection, block_size),
            sparse=0 if plan.selection is None else len(plan.selection.counts),
            tail=int(shape.tail),
        )


def _selected_pairs(plan: SelectionPlan | None, block_size: int) -> int:
    return 0 if plan is None else int(plan.counts @ plan.num_rows) * block_size


def _causal_pairs(plan: CausalPlan | None) -> int:
    """Row i of a request's n new rows sees i + 1 of them."""
    if plan is None:
        return 0
    sizes = np.bincount(plan.groups[plan.groups >= 0])
    return int((sizes * (sizes + 1) // 2).sum())


def _shared_pairs(plan: SharedPlan | None, row_requests: NDArray[np.int64]) -> int:
    """Group by group: of the table of requests and blocks most is nobody's where many have blocks of their own."""
    pairs = 0
    for rows, begin, end in () if plan is None else plan.groups:
        requests, num_rows = row_requests[rows[:1]], np.array([len(rows)])
        if row_requests[rows[-1]] != requests[0]:  # rows ascend
            requests, num_rows = np.unique(row_requests[rows], return_counts=True)
        assert plan is not None
        seen = plan.hi[requests, begin:end] - plan.lo[requests, begin:end]
        pairs += int(seen.sum(axis=1) @ num_rows)
    return pairs
