"""Which blocks of the KV cache have a summary, and which are full and wait for one."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray


class SummaryQueue:
    """A summary exists for full blocks only, and dies when its block is written again.

    Blocks wait because a graph has room for a fixed number of summaries; a block without one is attended in any case,
    so waiting costs work and never a token.

    Args:
        num_blocks: of the KV cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.ready = np.zeros(num_blocks, np.bool_)
        self._waiting = np.zeros(num_blocks, np.bool_)
        self._queue: deque[int] = deque()

    def __len__(self) -> int:
        """Blocks that wait."""
        return int(self._waiting.sum())

    def written(self, blocks: NDArray[np.integer]) -> None:
        """These blocks get new tokens in this step."""
        self.ready[blocks] = False
        self._waiting[blocks] = False

    def brought(self, blocks: NDArray[np.integer]) -> None:
        """The summaries of these full blocks have come from elsewhere."""
        self.ready[blocks] = True
        self._waiting[blocks] = False

    def full(self, blocks: NDArray[np.integer]) -> None:
        """These blocks are full once this step's tokens are written; those with a summary keep it."""
        missing = np.unique(blocks[~(self.ready[blocks] | self._waiting[blocks])])
        self._waiting[missing] = True
        self._queue.extend(missing.tolist())

    def take(self, most: int | None = None) -> NDArray[np.int64]:
        """Blocks to summarise in this step, those that wait longest first; from now on they have a summary."""
        taken: list[int] = []
        while self._queue and (most is None or len(taken) < most):
            block = self._queue.popleft()
            # written again meanwhile, or in the queue twice because of that
            if self._waiting[block]:
                self._waiting[block] = False
                taken.append(block)
        blocks = np.array(taken, np.int64)
        self.ready[blocks] = True
        return blocks

    def check_integrity(self) -> None:
        """Conservation: no block is ready and waiting; every waiting block stands in the queue."""
        both = np.flatnonzero(self.ready & self._waiting)
        lost = set(np.flatnonzero(self._waiting).tolist()) - set(self._queue)
        if len(both) or lost:
            raise AssertionError(f"summaries: ready and waiting {both.tolist()}, waiting but not queued {sorted(lost)}")
