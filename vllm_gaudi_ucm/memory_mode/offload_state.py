"""The scheduler's state of one request whose blocks may leave the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock


@dataclass
class OffloadState:
    """The state of a request from its start, or from its resumption, to its end or preemption. Blocks are logical.

    generation: distinguishes it from earlier and later states of the same request id; never used again.
    rows: by block that has a copy or gets one, the place of its summary.
    saving, saved: blocks whose copy is being made; blocks that have one.
    offloaded: blocks that are not in the block table.
    loading: offloaded blocks on their way back, and the physical blocks that wait for them; no table has these yet.
    lost: offloaded blocks whose copy could not be read.
    stored: offloaded blocks whose copy is the connector's record, and its key.
    to_evict, to_load: blocks to move according to the last scores.
    scores: decayed, by block. idle_steps: sparse steps since the last scores; next_scoring: after how many of them the
    next scores are due. stays: too much was missed, and every block comes back. is_guess: the blocks on the device were
    chosen without a query, and nothing was scored yet.
    """

    request_id: str
    generation: int
    rows: dict[int, int] = field(default_factory=dict)
    saving: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)
    offloaded: set[int] = field(default_factory=set)
    loading: dict[int, KVCacheBlock] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    stored: dict[int, bytes] = field(default_factory=dict)
    to_evict: list[int] = field(default_factory=list)
    to_load: list[int] = field(default_factory=list)
    scores: NDArray[np.float64] | None = None
    idle_steps: int = 0
    next_scoring: int = 1
    stays: bool = False
    is_guess: bool = False

    def want(self, *, to_evict: Sequence[int] | None = None, to_load: Sequence[int] | None = None) -> None:
        """Sets the blocks to evict and the blocks to load; None: as before."""
        if to_evict is not None:
            self.to_evict = list(to_evict)
        if to_load is not None:
            self.to_load = list(to_load)

    def take_scores(self, scores: NDArray[np.float64], refresh_steps: int) -> None:
        """Scores of every full block. The steps until the next ones double, up to `refresh_steps`."""
        if self.scores is not None:
            self.next_scoring = min(2 * self.next_scoring, refresh_steps)
        self.scores, self.idle_steps = scores, 0

    def begin_guess(self, is_guess: bool = True) -> None:
        """Begins with blocks that were left in the connector's store before any query. True if there are any."""
        self.is_guess = is_guess

    def end_guess(self) -> bool:
        """There are scores, or no use in waiting for them; returns whether it was a guess until now."""
        guessed, self.is_guess = self.is_guess, False
        return guessed

    def keep_all(self) -> bool:
        """Makes every block come back and stay; True if this is new."""
        stayed, self.stays = self.stays, True
        return not stayed

    def check_integrity(self) -> None:
        """Conservation: every copy has a row; every offloaded block has a copy; a block on its way back, or in the
        connector's store only, is offloaded."""
        broken = []
        if set(self.rows) != self.saving | self.saved or self.saving & self.saved:
            broken.append(f"rows {sorted(self.rows)}, saving {sorted(self.saving)}, saved {sorted(self.saved)}")
        if not self.offloaded <= self.saved:
            broken.append(f"offloaded {sorted(self.offloaded)} without a copy, saved {sorted(self.saved)}")
        if not (set(self.loading) | self.lost) <= self.offloaded:
            broken.append(
                f"loading {sorted(self.loading)} or lost {sorted(self.lost)}, offloaded {sorted(self.offloaded)}"
            )
        if not set(self.stored) <= self.offloaded:
            broken.append(f"stored {sorted(self.stored)}, offloaded {sorted(self.offloaded)}")
        if broken:
            raise AssertionError(f"KV offload of request {self.request_id!r}: {'; '.join(broken)}")
