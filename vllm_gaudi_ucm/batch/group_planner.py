"""Plans a step once for each KV-cache group; all layers of a group read its plan."""

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, GroupPlan, PlanOfGroup, SteadyPlanner, UnifiedPlan
from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.batch.selection_plan import SelectionInput
from vllm_gaudi_ucm.batch.steady_rows import SteadyRows
from vllm_gaudi_ucm.batch.window import Window

Planned = dict[tuple[int, Window | None], GroupPlan]
"""Plans of attention groups after the first, by block size and window."""


class GroupPlanner(Protocol):
    """Plans the steps of one KV-cache group."""

    def plan(self, batch: BatchInput, step: UnifiedPlan, planned: Planned) -> PlanOfGroup:
        """Returns the plan of the group.

        batch: with only the group's table. step: its rows, as in the first group. planned: plans of other groups of the
            step, to which an attention group adds its own plan.
        """
        ...


class AttentionPlanner:
    """Plans attention groups; see GroupPlanner.

    Args:
        batches: batches in flight, see SteadyPlanner.
    """

    def __init__(self, group: KvGroup, causal_slice: int = 512, batches: int = 1) -> None:
        self._group = group
        self.steady = SteadyPlanner(group.block_size, causal_slice, batches, group.window, SteadyRows)

    def plan(self, batch: BatchInput, step: UnifiedPlan, planned: Planned) -> GroupPlan:
        kind = (self._group.block_size, self._group.window)
        leader = planned.get(kind)
        found = None if leader is None else with_tables(step, leader, batch.block_tables, self._group)
        if found is None:
            found = self.steady.plan(batch).first
        planned.setdefault(kind, found)
        return found


class StepPlanner:
    """Plans steps of several groups.

    Args:
        planners: planner of each group, in the order of `BatchInput.tables`. The first one is an AttentionPlanner.
    """

    def __init__(self, planners: Sequence[GroupPlanner]) -> None:
        self._first = cast(AttentionPlanner, planners[0]).steady
        self._others = tuple(planners[1:])

    def plan(self, batch: BatchInput, selection: SelectionInput | None = None) -> UnifiedPlan:
        """Returns the plan of a step for all groups. selection: for the first group."""
        plan = self._first.plan(batch.of_group(0), selection)
        planned: Planned = {}
        others = (planner.plan(batch.of_group(number), plan, planned) for number, planner in enumerate(self._others, 1))
        return plan._replace(groups=(*plan.groups, *others))


def with_tables(plan: UnifiedPlan, leader: GroupPlan, tables: NDArray[np.int32], group: KvGroup) -> GroupPlan | None:
    """Returns a step's plan for another group with the same window: only the blocks differ. The step must consist of
    single rows that share nothing.

    A model with five windows for each layer of full attention has five such groups, and planning each separately costs
    five times as much. Returns None if rows share a block, or if a request has several rows.

    leader: plan of the group that is already planned. tables: int32 [requests, width] of the other group.
    """
    unique = leader.unique
    if unique is None or leader.shared is not None or leader.causal is not None:
        return None
    count = np.bincount(unique.rows, minlength=plan.num_rows)
    first: NDArray[np.int64] | int = 0
    if group.window is not None:
        first = group.window.first_seen(plan.positions) // group.block_size
    number = np.arange(len(unique.rows)) - (count.cumsum() - count - first).repeat(count)
    blocks = tables.take(plan.requests[unique.rows] * tables.shape[1] + number)
    ordered = np.sort(blocks)
    if np.count_nonzero(ordered[1:] == ordered[:-1]):
        return None
    last = tables[plan.requests, plan.positions // group.block_size].astype(np.int64)
    slots = last * group.block_size + plan.positions % group.block_size
    return leader._replace(slots=slots, unique=unique._replace(blocks=blocks.astype(np.int64)))


def make_planner(groups: Sequence[KvGroup], causal_slice: int, batches: int = 1) -> SteadyPlanner | StepPlanner:
    """Returns the planner of a model with only attention groups. groups: at least one."""
    return planner_of([AttentionPlanner(group, causal_slice, batches) for group in groups])


def planner_of(planners: Sequence[GroupPlanner]) -> SteadyPlanner | StepPlanner:
    """Returns one planner for several groups."""
    return StepPlanner(planners) if len(planners) > 1 else cast(AttentionPlanner, planners[0]).steady
