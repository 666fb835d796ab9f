"""Which blocks of a context should be on the device: pure arithmetic on scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.options import BlockOptions

if TYPE_CHECKING:
    from vllm_gaudi_ucm.kv_offload.options import MemoryModeOptions
    from vllm_gaudi_ucm.kv_offload.request_blocks import Life
    from vllm_gaudi_ucm.protocol.offload import ResidencyTotals


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


class ScoreBook:
    """Writes into lives what their scores ask for.

    Args:
        options: of memory mode.
        method: options of the method that chooses blocks.
        block_size: tokens per block.
        totals: takes what was missed.
    """

    def __init__(
        self, options: MemoryModeOptions, method: BlockOptions, block_size: int, totals: ResidencyTotals
    ) -> None:
        self._options = options
        self._method = method
        self._block_size = block_size
        self._totals = totals

    def take(self, life: Life, fresh: NDArray[np.float64]) -> bool:
        """Whether the step of these scores should be repeated: it was the first one on blocks that were loaded without
        a query, and missed too much; then everything in `life.coming` should come before.

        fresh: float64 [full blocks]; below 0 for a block without a score.
        """
        missed = missed_share(fresh, life.away)
        self._totals.scored += 1
        self._totals.missed += missed
        guessed, life.is_guess = life.is_guess, False
        if life.scores is not None:
            fresh = self._with_history(life.scores, fresh)
            life.next_scoring = min(2 * life.next_scoring, self._options.refresh_steps)
        life.scores, life.idle_steps = fresh, 0
        too_much = missed > self._options.max_missed
        if too_much and guessed:
            self._bring_first(life, fresh)
            return True
        if too_much:
            self._keep_all(life)
        self._set_target(life, fresh, self._options.moves_per_step)
        return False

    def _with_history(self, before: NDArray[np.float64], fresh: NDArray[np.float64]) -> NDArray[np.float64]:
        fresh, known = fresh.copy(), before[: len(fresh)]
        both = (known >= 0) & (fresh[: len(known)] >= 0)
        fresh[: len(known)][both] += self._options.history_decay * known[both]
        return fresh

    def _bring_first(self, life: Life, scores: NDArray[np.float64]) -> None:
        self._set_target(life, scores, len(scores))
        if missed_share(scores, life.away.difference(life.coming)) > self._options.max_missed:
            self._keep_all(life)
            self._set_target(life, scores, len(scores))

    def _keep_all(self, life: Life) -> None:
        if not life.stays:
            life.stays = True
            self._totals.kept += 1

    def _set_target(self, life: Life, scores: NDArray[np.float64], max_swaps: int) -> None:
        life.leaving, life.coming = resident_target(
            scores,
            life.away,
            life.lost | set(life.loading),
            self._block_size,
            1.0 if life.stays else self._options.resident_ratio,
            len(scores) if life.stays else max_swaps,
            self._method,
        )
