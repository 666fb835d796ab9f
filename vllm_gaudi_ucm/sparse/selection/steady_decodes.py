"""Recognises decodes that continue within their blocks: most steps of most servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vllm_gaudi_ucm.batch.batch_plan import BatchInput


class SteadyDecodes:
    """Recognises steps that only write the next token of each request of the previous step, in the block that the
    previous step wrote last: no block begins or becomes full in them, so that no summary is added or lost.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ids: list[str] = []
        # plain lists, which are faster than arrays for a few numbers
        self._next: list[int] = []
        self._ones: list[int] = []
        self._left = 0

    def forget(self) -> None:
        """Called when blocks or requests have changed other than by steps: the next step is not steady."""
        self._left = 0

    def follow(self, request_ids: Sequence[str], batch: BatchInput, num_drafts: NDArray[np.int64]) -> None:
        """Follows a step of any kind after all its blocks were recorded. With drafts the next step is not known."""
        ends = batch.num_computed + batch.num_scheduled
        within = ends % self._block_size
        # at 0 a block begins with the next token
        goes_on = len(within) and within.all() and not num_drafts.any()
        self._left = self._block_size - 1 - int(within.max()) if goes_on else 0
        if self._left:
            self._ids, self._next, self._ones = list(request_ids), ends.tolist(), [1] * len(ends)

    def go_on(self, request_ids: Sequence[str], batch: BatchInput) -> bool:
        """Returns whether a step is steady; if so, it is followed."""
        if (
            not self._left
            or request_ids != self._ids
            or batch.num_scheduled.tolist() != self._ones
            or batch.num_computed.tolist() != self._next
        ):
            self._left = 0
            return False
        self._left -= 1
        self._next = [position + 1 for position in self._next]
        return True
