"""A step of several KV-cache groups: its tensors, the bucket that has room for it, and its division into parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan
from vllm_gaudi_ucm.batch.block_use import Room
from vllm_gaudi_ucm.batch.row_input import BUILT_IN_INPUTS, RowInputs
from vllm_gaudi_ucm.execution.cache_group import CacheGroup
from vllm_gaudi_ucm.execution.step_tensors import StepTensor, input_tensors
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.shapes.group_room import with_groups


def step_table(groups: Sequence[CacheGroup], inputs: RowInputs = BUILT_IN_INPUTS) -> tuple[StepTensor, ...]:
    """Returns the tensors of a step of these groups, for a model that reads these inputs.

    Raises:
        ValueError: an input or a group has a tensor with the name of another one.
    """
    of_groups = (entry for number, group in enumerate(groups) for entry in group.tensors(number))
    table = (*input_tensors(inputs), *of_groups)
    names = Counter(entry.name for entry in table)
    for entry in table:
        if names[entry.name] > 1:
            kind = "row input" if entry.is_input else "tensor of a cache group"
            raise ValueError(
                f"{kind} {entry.name!r}: found another tensor of a step with this name; choose another name"
            )
    return table


def held_by_groups(true: Bucket, plan: UnifiedPlan, groups: Sequence[CacheGroup]) -> Bucket:
    """The true shape of a step, raised until buckets that hold it have room for all of its groups."""
    needs = (group.blocks(one) for one, group in zip(plan.groups[1:], groups[1:], strict=True))
    return with_groups(true, [need for need in needs if need is not None])


def divided_by(
    others: Sequence[CacheGroup], batch: BatchInput, divisions: list[NDArray[np.int64]], room: Room | None
) -> list[NDArray[np.int64]]:
    """Returns the parts of a step, divided further if a group needs that.

    others: the groups behind the first. divisions: requests of each part, by index. room: see `CacheGroup.divide`.
    """
    for number, group in enumerate(others, 1):
        whole = batch.of_group(number)
        parts = [(index, group.divide(whole.take(index), room)) for index in divisions]
        divisions = [index[part] for index, found in parts for part in found]
    return divisions
