"""Recognises steps whose requests choose from the same blocks as in the previous step, whatever they have accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.block_table import has_same_blocks
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import BatchInput
    from vllm_gaudi_ucm.batch.selection_plan import SelectionInput

MODE, WINDOW_START, THRESHOLD, TILE_ROWS = 0, 2, 4, 5
"""Places in the scheduler's decision about a request, as a line of an array."""
BOUNDS = slice(1, 4)


@dataclass
class Choice:
    """The choices of a step.

    Args:
        asked: the requests that choose.
        index, slots, counts: int64 [sparse], their places in the batch, the slots of their choices, and how many blocks
            each chooses.
        told: int64 [sparse, 6], the scheduler's decisions.
    """

    asked: list[str]
    index: NDArray[np.int64]
    slots: NDArray[np.int64]
    counts: NDArray[np.int64]
    told: NDArray[np.int64]
    selection: SelectionInput


@dataclass
class _Blocks:
    """The blocks of a step's requests.

    Args:
        num_full: int64 [requests], blocks that are full of certain tokens.
        num: int64 [requests], blocks with any tokens.
        tables: int32 [requests, width].
    """

    num_full: NDArray[np.int64]
    num: NDArray[np.int64]
    tables: NDArray[np.int32]


@dataclass
class NewBlocks:
    """Blocks in which a step writes the first tokens, and blocks that it fills, int32 [n] each."""

    begun: NDArray[np.int32]
    filled: NDArray[np.int32]


class SteadyChoices:
    """Remembers the choices of the last step, and recognises a step that makes them again.

    Nothing but the blocks of the batch may have changed in between; the caller ensures this.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ids: list[str] = []
        self._choice: Choice | None = None
        self._blocks: _Blocks

    def forget(self) -> None:
        """Called when choices or blocks have changed other than by steps: the next step is not steady."""
        self._choice = None

    def follow(
        self, request_ids: Sequence[str], batch: BatchInput, num_drafts: NDArray[np.int64], choice: Choice
    ) -> None:
        """Follows a step in which no block is absent, after its choices were stored."""
        told, selection = choice.told, choice.selection
        # a request that is dense, has no stored choice to reuse, or has tiles is decided anew
        keeps = choice.counts.all() and not told[:, TILE_ROWS].any()
        blocks = self._count(batch, num_drafts)
        is_open = told[:, MODE] != SelectionMode.REUSE
        # a block that becomes full must not compete
        keeps = keeps and (told[is_open, WINDOW_START] <= blocks.num_full[choice.index[is_open]]).all()
        self._choice = choice if keeps and np.array_equal(selection.modes[choice.index], told[:, MODE]) else None
        self._ids, self._blocks = list(request_ids), blocks

    def go_on(
        self,
        request_ids: Sequence[str],
        batch: BatchInput,
        num_drafts: NDArray[np.int64],
        asked: Sequence[str],
        told: NDArray[np.int64],
    ) -> tuple[Choice, NewBlocks] | None:
        """Returns the choices of a step and its new blocks, or None if it is not steady. asked, told: see Choice."""
        kept, self._choice = self._choice, None
        if kept is None or request_ids != self._ids or asked != kept.asked:
            return None
        before, after = self._blocks, self._count(batch, num_drafts)
        # blocks are only written from the last full one on
        if (batch.num_computed // self._block_size < before.num_full).any() or (after.num_full < before.num_full).any():
            return None
        if not has_same_blocks(before.tables, after.tables, before.num):
            return None
        modes = told[:, MODE]
        is_known = (modes == kept.told[:, MODE]) | (modes == SelectionMode.REUSE)
        if not is_known.all() or told[:, TILE_ROWS].any() or (told[:, BOUNDS] != kept.told[:, BOUNDS]).any():
            return None
        new = NewBlocks(
            _between(after.tables, before.num, after.num), _between(after.tables, before.num_full, after.num_full)
        )
        # a rejected draft has begun a block which is still begun
        self._blocks = _Blocks(after.num_full, np.maximum(before.num, after.num), after.tables)
        selection = self._selection(kept, told, num_drafts, after.tables.shape[1])
        self._choice = Choice(kept.asked, kept.index, kept.slots, kept.counts, told, selection)
        return self._choice, new

    def _count(self, batch: BatchInput, num_drafts: NDArray[np.int64]) -> _Blocks:
        end = (batch.num_computed + batch.num_scheduled).astype(np.int64)
        return _Blocks((end - num_drafts) // self._block_size, -(-end // self._block_size), batch.block_tables.copy())

    def _selection(
        self, kept: Choice, told: NDArray[np.int64], num_drafts: NDArray[np.int64], width: int
    ) -> SelectionInput:
        selection = kept.selection._replace(num_drafts=num_drafts)
        if not np.array_equal(told, kept.told):
            modes, thresholds = selection.modes.copy(), selection.thresholds.copy()
            modes[kept.index], thresholds[kept.index] = told[:, MODE], told[:, THRESHOLD]
            selection = selection._replace(modes=modes, thresholds=thresholds)
        more = width - selection.candidates.shape[1]
        if more:
            selection = selection._replace(candidates=np.pad(selection.candidates, ((0, 0), (0, more))))
        return selection


def _between(tables: NDArray[np.int32], first: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int32]:
    """Returns [n] the blocks [first, end) of each request."""
    if not (first < end).any():
        return tables[:0, 0]
    number = np.arange(tables.shape[1])
    found: NDArray[np.int32] = tables[(number >= first[:, None]) & (number < end[:, None])]
    return found
