"""Decides which blocks of a context should be on the device: pure arithmetic on scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.options import BlockOptions

if TYPE_CHECKING:
    from vllm_gaudi_ucm.memory_mode.offload_state import OffloadState
    from vllm_gaudi_ucm.memory_mode.options import MemoryModeOptions
    from vllm_gaudi_ucm.protocol.offload import OffloadTotals


class ChosenMoves(NamedTuple):
    """Logical blocks. to_evict: to leave the device, least wanted first. to_load: to come back, most wanted first."""

    to_evict: list[int]
    to_load: list[int]


def wanted_blocks(scores: NDArray[np.float64], block_size: int, options: BlockOptions) -> list[int]:
    """The blocks that the method would choose between sinks and local window by these scores, best first.

    Args:
        scores: [full blocks of the context]; below 0 for a block without a score.
    """
    budget = block_budget(len(scores) * block_size, block_size, options)
    if budget is None:
        return []
    order = np.argsort(-scores[budget.sink_blocks : budget.window_start], kind="stable")[: budget.num_selected]
    return [int(number) + budget.sink_blocks for number in order]


def missed_share(scores: NDArray[np.float64], offloaded: Iterable[int]) -> float:
    """Estimated share of the attention that falls on these blocks."""
    return float(scores[sorted(offloaded)].clip(0).sum() / max(scores.clip(0).sum(), 1e-9))


def choose_moves(
    scores: NDArray[np.float64],
    offloaded: Set[int],
    lost: Set[int],
    block_size: int,
    on_device_ratio: float,
    max_swaps: int,
    options: BlockOptions,
) -> ChosenMoves:
    """Returns what to move so that the best blocks of a context are on the device.

    Sinks, local window and blocks without a score stay. Of the others, it keeps as many as fit within `on_device_ratio`
    of all full blocks, and at least as many as the method chooses.

    Args:
        scores: [full blocks of the context]; below 0 for a block without a score.
        offloaded: blocks that are not on the device. lost: offloaded blocks that cannot come back.
        on_device_ratio: part of the full blocks that may be on the device.
        max_swaps: most blocks that come back.
    """
    full = len(scores)
    budget = block_budget(full * block_size, block_size, options)
    if budget is None:
        return ChosenMoves([], [])
    between = [number for number in range(budget.sink_blocks, budget.window_start) if number not in lost]
    live = full - budget.num_candidates
    room = max(budget.num_selected, math.ceil(on_device_ratio * full - 1e-9) - live)
    # blocks without a score cannot be compared, and stay
    room -= sum(1 for number in between if scores[number] < 0 and number not in offloaded)
    ranked = sorted((number for number in between if scores[number] >= 0), key=lambda number: -scores[number])
    to_load = [number for number in ranked[: max(0, room)] if number in offloaded][:max_swaps]
    staying = max(0, room - len(to_load))
    to_evict = [number for number in ranked if number not in offloaded][staying:]
    return ChosenMoves(to_evict[::-1], to_load)


def dispensable_blocks(
    full: int, missing: Sequence[int], block_size: int, on_device_ratio: float, options: BlockOptions
) -> list[int]:
    """Returns the blocks that need not come to the device, least wanted first; empty if the step is dense.

    Sinks and local window are always needed, and of the others as many as KV offload would keep.

    Args:
        full: blocks of the context; up to a block of tokens more is to be computed, maybe in several steps.
        missing: blocks that are not on the device, most wanted first.
        on_device_ratio: part of the full blocks that may be on the device.
    """
    # windows only move away from what is missing as tokens are added, and by the block that a full tail block adds to
    # the budget there is one more on the device to choose from
    budget = block_budget(full * block_size + 1, block_size, options)
    if budget is None:
        return []
    between = [number for number in missing if budget.sink_blocks <= number < budget.window_start]
    live = full - budget.num_candidates
    room = max(budget.num_selected, math.ceil(on_device_ratio * full - 1e-9) - live)
    here = budget.num_candidates - len(between)
    return between[max(0, room - here) :][::-1]


class ScoreBook:
    """Turns the scores of requests into blocks to evict and blocks to load.

    Args:
        totals: takes what was missed.
    """

    def __init__(
        self, options: MemoryModeOptions, method: BlockOptions, block_size: int, totals: OffloadTotals
    ) -> None:
        self._options = options
        self._method = method
        self._block_size = block_size
        self._totals = totals

    def take_scores(self, state: OffloadState, fresh: NDArray[np.float64]) -> bool:
        """Sets the blocks to evict and to load. Returns True if the step of these scores should be repeated after
        `state.to_load`, because it was the first one on blocks that were loaded without a query and missed too much.

        fresh: float64 [full blocks]; below 0 for a block without a score.
        """
        missed = missed_share(fresh, state.offloaded)
        self._totals.scored += 1
        self._totals.missed += missed
        guessed = state.end_guess()
        if state.scores is not None:
            fresh = self._with_history(state.scores, fresh)
        state.take_scores(fresh, self._options.refresh_steps)
        too_much = missed > self._options.max_missed
        if too_much and guessed:
            self._bring_first(state, fresh)
            return True
        if too_much:
            self._keep_all(state)
        self._set_target(state, fresh, self._options.moves_per_step)
        return False

    def _with_history(self, before: NDArray[np.float64], fresh: NDArray[np.float64]) -> NDArray[np.float64]:
        fresh, known = fresh.copy(), before[: len(fresh)]
        both = (known >= 0) & (fresh[: len(known)] >= 0)
        fresh[: len(known)][both] += self._options.history_decay * known[both]
        return fresh

    def _bring_first(self, state: OffloadState, scores: NDArray[np.float64]) -> None:
        self._set_target(state, scores, len(scores))
        if missed_share(scores, state.offloaded.difference(state.to_load)) > self._options.max_missed:
            self._keep_all(state)
            self._set_target(state, scores, len(scores))

    def _keep_all(self, state: OffloadState) -> None:
        self._totals.kept += state.keep_all()

    def _set_target(self, state: OffloadState, scores: NDArray[np.float64], max_swaps: int) -> None:
        moves = choose_moves(
            scores,
            state.offloaded,
            state.lost | set(state.loading),
            self._block_size,
            on_device_ratio=1.0 if state.stays else self._options.on_device_ratio,
            max_swaps=len(scores) if state.stays else max_swaps,
            options=self._method,
        )
        state.want(to_evict=moves.to_evict, to_load=moves.to_load)
