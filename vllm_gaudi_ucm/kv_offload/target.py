"""Which blocks of a context should be on the device: pure arithmetic on scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.options import BlockOptions


class Target(NamedTuple):
    """Logical blocks. leaving: to leave the device, least wanted first. coming: to come back, most wanted first."""

    leaving: list[int]
    coming: list[int]


def wanted_blocks(scores: NDArray[np.float64], block_size: int, options: BlockOptions) -> list[int]:
    """Of the blocks between sinks and local window as many as the method chooses, by these scores, the best first.

    Args:
        scores: [full blocks of the context]; below 0 for a block without a score.
        block_size: tokens per block.
        options: of the method.
    """
    budget = block_budget(len(scores) * block_size, block_size, options)
    if budget is None:
        return []
    order = np.argsort(-scores[budget.sink_blocks : budget.window_start], kind="stable")[: budget.num_selected]
    return [int(number) + budget.sink_blocks for number in order]


def missed_share(scores: NDArray[np.float64], away: Iterable[int]) -> float:
    """Estimated share of the attention that falls on these blocks."""
    return float(scores[sorted(away)].clip(0).sum() / max(scores.clip(0).sum(), 1e-9))


def resident_target(
    scores: NDArray[np.float64],
    away: Set[int],
    lost: Set[int],
    block_size: int,
    resident_ratio: float,
    max_swaps: int,
    options: BlockOptions,
) -> Target:
    """What to move so that the best of a context are on the device.

    Sinks, local window and blocks without a score stay. Of the others as many are kept as `resident_ratio` of all full
    blocks leaves room for, and at least as many as the method chooses.

    Args:
        scores: [full blocks of the context]; below 0 for a block without a score.
        away: blocks that are not on the device. lost: those among them that cannot come back.
        block_size: tokens per block.
        resident_ratio: part of the full blocks that may be on the device.
        max_swaps: most blocks that come back.
        options: of the method.
    """
    full = len(scores)
    budget = block_budget(full * block_size, block_size, options)
    if budget is None:
        return Target([], [])
    between = [number for number in range(budget.sink_blocks, budget.window_start) if number not in lost]
    live = full - budget.num_candidates
    room = max(budget.num_selected, math.ceil(resident_ratio * full - 1e-9) - live)
    # what has no score cannot be compared, and stays
    room -= sum(1 for number in between if scores[number] < 0 and number not in away)
    ranked = sorted((number for number in between if scores[number] >= 0), key=lambda number: -scores[number])
    coming = [number for number in ranked[: max(0, room)] if number in away][:max_swaps]
    staying = max(0, room - len(coming))
    leaving = [number for number in ranked if number not in away][staying:]
    return Target(leaving[::-1], coming)
