"""Successive verifications of drafts as a worker plans them: requests accept any number of drafts in between."""

from __future__ import annotations

import random

import numpy as np

from vllm_gaudi_ucm.batch.batch_plan import BatchInput
from vllm_gaudi_ucm.batch.selection_plan import DENSE, SelectionInput

WIDTH = 40


class Verifications:
    """Requests of 1 + `drafts` rows each, of which some share a prefix, and a choice of blocks for some of them.

    Args:
        rng: decides.
        block_size: tokens per block.
        drafts: of each request in a step; 0 for plain decodes.
        prefix: full blocks that all requests share.
        choosing: whether requests choose blocks.
    """

    def __init__(
        self, rng: random.Random, block_size: int, drafts: list[int], *, prefix: int = 0, choosing: bool = False
    ) -> None:
        self._rng = rng
        self._block_size = block_size
        self._drafts = drafts
        self._next_block = 100 + prefix
        self._choosing = choosing
        self._steps = 0
        count = len(drafts)
        own = [rng.randrange(1, 6 * block_size) for _ in drafts]
        self.computed = np.array([prefix * block_size + tokens for tokens in own], np.int32)
        self._tables = np.random.default_rng(rng.randrange(100)).integers(1, 100, (count, WIDTH)).astype(np.int32)
        self._tables[:, :prefix] = np.arange(100, 100 + prefix)
        self._held = np.full(count, prefix)
        self._slots = np.array(rng.sample(range(count + 2), count), np.int64)
        self._sinks = np.array([rng.randrange(3) for _ in drafts])
        self._window = self._candidates_end()

    def step(self) -> tuple[BatchInput, SelectionInput | None]:
        """Returns the next step; afterwards a random number of its drafts counts as accepted."""
        rows = np.array(self._drafts, np.int32) + 1
        end = -(-(self.computed + rows) // self._block_size)
        for request, blocks in enumerate(end.tolist()):
            for column in range(self._held[request], blocks):
                self._tables[request, column] = self._next_block
                self._next_block += 1
            self._held[request] = max(self._held[request], blocks)
        batch = BatchInput(
            self.computed.copy(), rows, self.computed + 1, (self._tables[:, : int(self._held.max())].copy(),)
        )
        selection = self._selection(batch) if self._choosing else None
        self.computed = self.computed + 1 + np.array([self._rng.randint(0, n) for n in self._drafts], np.int32)
        self._steps += 1
        return batch, selection

    @property
    def is_over(self) -> bool:
        """Returns whether a table would be too narrow for the next step."""
        return int((self.computed + max(self._drafts) + 1).max()) > (WIDTH - 1) * self._block_size

    def _candidates_end(self) -> np.ndarray:
        return np.maximum(self.computed // self._block_size - 1, 0)

    def _selection(self, batch: BatchInput) -> SelectionInput:
        if self._rng.random() < 0.1:
            self._window = self._candidates_end()
        column = np.arange(batch.block_tables.shape[1])
        candidates = (column >= self._sinks[:, None]) & (column < self._window[:, None])
        counts = np.minimum(np.count_nonzero(candidates, axis=1), 2)
        mode = self._rng.choice([0, 1, 1, 2])
        chooses = counts > 0
        return SelectionInput(
            modes=np.where(chooses, mode, DENSE).astype(np.int64),
            counts=counts.astype(np.int64),
            thresholds=np.where(chooses, 3 * (mode == 2), 0).astype(np.int64),
            slots=np.where(chooses, self._slots, 0),
            candidates=candidates & chooses[:, None],
            width=WIDTH,
            most=5,
            num_drafts=np.array(self._drafts, np.int64),
        )
