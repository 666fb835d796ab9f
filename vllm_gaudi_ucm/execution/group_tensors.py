"""Tensors of a step for each KV-cache group: entries of the table of `step_tensors`, and the parts made of them.

Tensors of the first group have plain names, those of group k end with `.k`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from vllm_gaudi_ucm.batch.batch_plan import GroupPlan, UnifiedPlan
from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.batch.row_input import BUILT_IN_INPUTS, RowInputs
from vllm_gaudi_ucm.execution.group_names import group_suffix
from vllm_gaudi_ucm.execution.step_sizes import Sizes
from vllm_gaudi_ucm.execution.step_tensors import PLAN_TENSORS, StepTensor, input_tensors, of_window
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.shapes.group_room import GroupBlocks, group_room, with_groups
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK

Size = Callable[[Sizes], tuple[int, ...] | None]

ONE_GROUP = (KvGroup(0, 1),)
"""Stands for all layers in one group with full attention, where nothing depends on its block size."""


def step_table(groups: Sequence[KvGroup], inputs: RowInputs = BUILT_IN_INPUTS) -> tuple[StepTensor, ...]:
    """Returns the tensors of a step of these groups, for a model that reads these inputs.

    Raises:
        ValueError: an input has the name of another tensor.
    """
    others = (entry for number, group in enumerate(groups[1:], 1) for entry in _entries(number, group))
    table = (*input_tensors(inputs), *PLAN_TENSORS, *others)
    names = Counter(entry.name for entry in table)
    for entry in table:
        if entry.is_input and names[entry.name] > 1:
            raise ValueError(
                f"row input {entry.name!r}: found another tensor of a step with this name; choose another name"
            )
    return table


class _Sizes(NamedTuple):
    """Sizes of a group's tensors in a bucket."""

    rows: Size
    causal_rows: Size
    shared_rows: Size
    shared: Size
    ranges: Size
    unique: Size


def _sizes(number: int, group: KvGroup) -> _Sizes:
    def room(sizes: Sizes) -> GroupBlocks:
        return group_blocks(number, group, sizes.shape, sizes.limits)

    def shared(sizes: Sizes, *before: int) -> tuple[int, ...] | None:
        blocks = room(sizes).shared
        return (*before, blocks) if blocks else None

    return _Sizes(
        rows=lambda sizes: (sizes.shape.query_len,),
        causal_rows=lambda sizes: (sizes.shape.query_len,) if "c" in sizes.shape.phase else None,
        shared_rows=lambda sizes: (sizes.shape.query_len,) if room(sizes).shared else None,
        shared=shared,
        ranges=lambda sizes: shared(sizes, sizes.spans),
        unique=lambda sizes: (room(sizes).unique,) if room(sizes).unique else None,
    )


def group_blocks(number: int, group: KvGroup, shape: ForwardShape, limits: Limits) -> GroupBlocks:
    """Blocks of a group that a bucket has room for; number: its place among the groups."""
    if not number:
        return GroupBlocks(shape.shared_blocks, shape.unique_blocks)
    return group_room(shape, limits, group.most_blocks)


def _entries(number: int, group: KvGroup) -> list[StepTensor]:
    """Of a group behind the first. It gathers its unique blocks: a slice would span those of all groups."""
    size, end = _sizes(number, group), group_suffix(number)

    def entry(
        name: str,
        path: str,
        size: Size,
        pad: int | Callable[[Sizes], int] = 0,
        part: str | None = None,
        dtype: type[np.integer[Any]] = np.int64,
    ) -> StepTensor:
        """path: to the values in the group's plan."""
        get, parts = attrgetter(path), ("rows" if part is None else part + end,)
        return StepTensor(name + end, lambda step: get(step.plan.groups[number]), size, pad, parts, dtype)

    def of_rows(name: str, path: str, size: Size, part: str) -> StepTensor:
        get = attrgetter(path)
        return StepTensor(
            name + end,
            lambda step: of_window(get(step.plan.groups[number])),
            size,
            0,
            (part + end,),
            only="bucket",
        )

    # where rows see their whole contexts ranges begin at the first token, and no operator of a bucket compares with it
    whole = group.window is None
    entries = [
        entry("slots", "slots", size.rows, DUMMY_BLOCK),
        entry("shared_blocks", "shared.blocks", size.shared, DUMMY_BLOCK, "shared"),
        StepTensor(
            "row_spans" + end,
            attrgetter("plan.row_requests"),
            size.shared_rows,
            lambda sizes: sizes.spans - 1,
            ("shared" + end,),
        ),
        entry("shared_lo", "shared.lo", never if whole else size.ranges, 0, "shared", np.int32),
        entry("shared_hi", "shared.hi", size.ranges, 0, "shared", np.int32),
        entry("unique_blocks", "unique.blocks", size.unique, DUMMY_BLOCK, "unique"),
        entry("unique_rows", "unique.rows", size.unique, 0, "unique"),
        entry("unique_lo", "unique.lo", never if whole else size.unique, 0, "unique", np.int32),
        entry("unique_hi", "unique.hi", size.unique, 0, "unique", np.int32),
    ]
    if not whole:
        entries.append(of_rows("shared_rise", "shared.rise", size.shared_rows, "shared"))
        entries.append(of_rows("causal_first_rows", "causal.first_rows", size.causal_rows, "causal"))
    return entries


def never(sizes: Sizes) -> None:
    """The size of what a bucket has not."""
    return None


def held_by_groups(true: Bucket, plan: UnifiedPlan, groups: Sequence[KvGroup]) -> Bucket:
    """The true shape of a step, raised until buckets that hold it have room for all of its groups."""
    others = [(_blocks(one), group.most_blocks) for one, group in zip(plan.groups[1:], groups[1:], strict=True)]
    return with_groups(true, others)


def _blocks(plan: GroupPlan) -> GroupBlocks:
    shared = 0 if plan.shared is None else len(plan.shared.blocks)
    return GroupBlocks(shared, 0 if plan.unique is None else len(plan.unique.blocks))
