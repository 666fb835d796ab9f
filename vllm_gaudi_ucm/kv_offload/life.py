"""Where each block of one request is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass
class Life:
    """A request from its beginning, or from its resumption, to its end or preemption.

    number: which life it is; never used again. rows: of the blocks that have a copy, or of which one is being made.
    saving, saved: blocks of which a copy is being made, and is there. away: blocks that are not in the block table.
    loading: those among them on their way back, and the physical blocks that wait for them; no table has these yet.
    lost: those among them whose copy could not be read. stored: those among them whose copy is the connector's record,
    and its key. leaving, coming: what the last scores ask for.
    scores: decayed, by logical block. idle_steps, next_scoring: sparse steps since the last scores, and at which the
    next are asked for. stays: too much was missed, and every block comes back. is_guess: what is on the device was
    chosen without a query, and nothing was scored yet.
    """

    request_id: str
    number: int
    rows: dict[int, int] = field(default_factory=dict)
    saving: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)
    away: set[int] = field(default_factory=set)
    loading: dict[int, KVCacheBlock] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    stored: dict[int, bytes] = field(default_factory=dict)
    leaving: list[int] = field(default_factory=list)
    coming: list[int] = field(default_factory=list)
    scores: NDArray[np.float64] | None = None
    idle_steps: int = 0
    next_scoring: int = 1
    stays: bool = False
    is_guess: bool = False

    def check_integrity(self) -> None:
        """Conservation: every copy has a row; what is away has a copy; what is on its way back, or in the connector's
        store only, is away."""
        broken = []
        if set(self.rows) != self.saving | self.saved or self.saving & self.saved:
            broken.append(f"rows {sorted(self.rows)}, saving {sorted(self.saving)}, saved {sorted(self.saved)}")
        if not self.away <= self.saved:
            broken.append(f"away {sorted(self.away)} without a copy, saved {sorted(self.saved)}")
        if not (set(self.loading) | self.lost) <= self.away:
            broken.append(f"loading {sorted(self.loading)} or lost {sorted(self.lost)}, away {sorted(self.away)}")
        if not set(self.stored) <= self.away:
            broken.append(f"stored {sorted(self.stored)}, away {sorted(self.away)}")
        if broken:
            raise AssertionError(f"memory mode of request {self.request_id!r}: {'; '.join(broken)}")
