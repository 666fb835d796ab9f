"""What the scores of a request's last query ask for: which blocks leave and come, and whether too much was missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_gaudi_ucm.kv_offload.target import missed_share, resident_target

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_gaudi_ucm.kv_offload.life import Life
    from vllm_gaudi_ucm.kv_offload.options import MemoryModeOptions
    from vllm_gaudi_ucm.protocol.offload_totals import ResidencyTotals
    from vllm_gaudi_ucm.sparse.options import BlockOptions


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
