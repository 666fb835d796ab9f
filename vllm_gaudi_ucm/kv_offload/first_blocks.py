"""Which blocks of a stored prompt its first sparse step can do without: pure arithmetic, as there is no query yet."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.options import BlockOptions


def dispensable_blocks(
    full: int, missing: Sequence[int], block_size: int, resident_ratio: float, options: BlockOptions
) -> list[int]:
    """The blocks that may stay where they are, least wanted first; empty where the step is dense.

    Sinks and local window are always wanted, and of the others as many as memory mode would keep.

    Args:
        full: blocks of the context; up to a block of tokens more is to be computed, maybe in several steps.
        missing: those that are not on the device, most wanted first.
        block_size: tokens per block.
        resident_ratio: part of the full blocks that may be on the device.
        options: of the method.
    """
    # windows only move away from what is missing as tokens are added, and by the block that a full tail adds to the
    # budget there is one more on the device to choose from
    budget = block_budget(full * block_size + 1, block_size, options)
    if budget is None:
        return []
    between = [number for number in missing if budget.sink_blocks <= number < budget.window_start]
    live = full - budget.num_candidates
    room = max(budget.num_selected, math.ceil(resident_ratio * full - 1e-9) - live)
    here = budget.num_candidates - len(between)
    return between[max(0, room - here) :][::-1]
