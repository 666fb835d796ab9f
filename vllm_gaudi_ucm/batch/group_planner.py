"""A step, planned for each KV-cache group once; all layers of a group read its plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, GroupPlan, SteadyPlanner, UnifiedPlan
from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.batch.selection_plan import SelectionInput
from vllm_gaudi_ucm.batch.window import Window


class GroupPlanner:
    """Plans of several groups as one.

    Args:
        groups: the first is that of `BatchInput.block_tables`, the others those of `BatchInput.others`.
        causal_slice: query rows per causal slice.
        batches: in flight, see SteadyPlanner.
    """

    def __init__(self, groups: Sequence[KvGroup], causal_slice: int = 512, batches: int = 1) -> None:
        self._groups = tuple(groups)
        self._planners = [SteadyPlanner(group.block_size, causal_slice, batches, group.window) for group in groups]

    def plan(self, batch: BatchInput, selection: SelectionInput | None = None) -> UnifiedPlan:
        """selection: of the first group; a group with a window has none."""
        plan = self._planners[0].plan(batch, selection)
        others = (batch._replace(block_tables=tables, others=()) for tables in batch.others)
        found = [*plan.groups]
        alike: dict[tuple[int, Window | None], GroupPlan] = {}
        for group, planner, one in zip(self._groups[1:], self._planners[1:], others, strict=True):
            kind = (group.block_size, group.window)
            leader = alike.get(kind)
            own = None if leader is None else with_tables(plan, leader, one.block_tables, group)
            found += planner.plan(one).groups if own is None else (own,)
            alike.setdefault(kind, found[-1])
        return plan._replace(groups=tuple(found))


def with_tables(plan: UnifiedPlan, leader: GroupPlan, tables: NDArray[np.int32], group: KvGroup) -> GroupPlan | None:
    """The plan of a step of single rows that share nothing, for another group that sees as far: its blocks differ.

    A model with five windows for each layer of full attention has five such groups, and planning one anew costs five
    times as much. None where rows share a block, or a request has several rows.

    leader: of the group that is planned. tables: int32 [requests, width] of the other group.
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


def make_planner(groups: Sequence[KvGroup], causal_slice: int, batches: int = 1) -> SteadyPlanner | GroupPlanner:
    """groups: at least one."""
    if len(groups) > 1:
        return GroupPlanner(groups, causal_slice, batches)
    return SteadyPlanner(groups[0].block_size, causal_slice, batches, groups[0].window)
