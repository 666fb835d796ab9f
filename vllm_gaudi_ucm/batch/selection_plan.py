"""The blocks of a step from which a sparse method chooses: a part of the plan, and also a pure function."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DENSE, REUSE = -1, 1
"""Modes of a request that attends to its whole context, and of one that reuses its stored choice (`SelectionMode`)."""


class SelectionInput(NamedTuple):
    """The input of a choice of blocks, one entry per scheduled request in the order of the BatchInput.

    modes: int64 [requests] how the choice is made (`SelectionMode`), or DENSE.
    counts: int64 [requests] number of blocks to choose, at most the number of candidates.
    thresholds: int64 [requests] largest difference at which a check keeps the stored choice.
    slots: int64 [requests] slot in which the choice is stored.
    candidates: bool [requests, table width] logical blocks that compete; all others are always attended.
    width: logical blocks of the longest request. most: blocks chosen for it.
    absent: bool [requests, table width] logical blocks that are not on the device: they neither compete nor are ever
        attended. None if there are none.
    num_drafts: int64 [requests] number of last rows of the request that may be rejected. None if there are none.
    tile_rows: int64 [requests] rows of the request that choose together, 0 if all do. None if all of all requests do.
    row_step: step from one row of a tile that scores blocks to the next one.
    """

    modes: NDArray[np.int64]
    counts: NDArray[np.int64]
    thresholds: NDArray[np.int64]
    slots: NDArray[np.int64]
    candidates: NDArray[np.bool_]
    width: int
    most: int
    absent: NDArray[np.bool_] | None = None
    num_drafts: NDArray[np.int64] | None = None
    tile_rows: NDArray[np.int64] | None = None
    row_step: int = 1

    def take(self, index: NDArray[np.int64]) -> SelectionInput:
        """Returns the entries of these requests."""
        return self._replace(
            modes=self.modes[index],
            counts=self.counts[index],
            thresholds=self.thresholds[index],
            slots=self.slots[index],
            candidates=self.candidates[index],
            absent=None if self.absent is None else self.absent[index],
            num_drafts=None if self.num_drafts is None else self.num_drafts[index],
            tile_rows=None if self.tile_rows is None else self.tile_rows[index],
        )

    def in_tiles(self, index: NDArray[np.int64], tile_rows: NDArray[np.int64], row_step: int) -> SelectionInput:
        """Returns the same input with the tiles of these requests."""
        every = np.zeros(len(self.modes), np.int64)
        every[index] = tile_rows
        return self._replace(tile_rows=every, row_step=row_step)

    def left_out(self) -> NDArray[np.bool_] | None:
        """Returns bool [requests, table width]: blocks attended by choice or never; None if every block is attended."""
        if self.absent is None:
            return None if (self.modes == DENSE).all() else self.candidates
        return self.candidates | self.absent


class SelectionPlan(NamedTuple):
    """A step's choices, as arrays that later become tensors. A span is a request with a choice, or a tile of a prompt's
    rows; spans are in flat order.

    A block of a span has a place: span * width + logical block number. A rank also has a place: span * most + rank.

    first_rows, num_rows: int64 [spans] its rows in the flat batch.
    scored_rows: int64 [spans] the last of them that is not a draft: in memory mode all blocks are scored by its query.
    ranked_rows: int64 [spans] number of rows by which its candidates are ranked: 0 if the stored choice is reused.
    row_steps: int64 [spans] step from one row that scores its candidates to the next one.
    modes, counts, thresholds, choice_slots: int64 [spans], as in SelectionInput.
    candidate_blocks: int64 [candidates] physical block ids. candidate_spans: int64 [candidates].
    candidate_places: int64 [candidates].
    choice_places: int64 [selected] place of the rank. choice_spans: int64 [selected].
    choice_hi: int64 [selected] number of tokens of the block that are seen: all.
    """

    first_rows: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    scored_rows: NDArray[np.int64]
    ranked_rows: NDArray[np.int64]
    row_steps: NDArray[np.int64]
    modes: NDArray[np.int64]
    counts: NDArray[np.int64]
    thresholds: NDArray[np.int64]
    choice_slots: NDArray[np.int64]
    candidate_blocks: NDArray[np.int64]
    candidate_spans: NDArray[np.int64]
    candidate_places: NDArray[np.int64]
    choice_places: NDArray[np.int64]
    choice_spans: NDArray[np.int64]
    choice_hi: NDArray[np.int64]


def plan_selection(
    selection: SelectionInput,
    requests: NDArray[np.int64],
    query_start: NDArray[np.int64],
    block_tables: NDArray[np.int32],
    block_size: int,
) -> SelectionPlan | None:
    """Returns the choices of a step; None if every request is dense.

    Args:
        selection: the blocks that compete, and how they are chosen.
        requests: [requests] index into the BatchInput for each request in flat order.
        query_start: [requests + 1] first row of each request in flat order.
        block_tables: [requests, table width] of the BatchInput.
    """
    flat = np.flatnonzero(selection.modes[requests] != DENSE)
    if not len(flat):
        return None
    first_rows, num_rows = query_start[flat], query_start[flat + 1] - query_start[flat]
    if selection.tile_rows is not None:
        flat, first_rows, num_rows = _tiles(flat, first_rows, num_rows, selection.tile_rows[requests[flat]])
    sparse = requests[flat]
    is_tile = np.zeros(len(sparse), np.bool_) if selection.tile_rows is None else selection.tile_rows[sparse] > 0
    # from a flat array: in two dimensions numpy takes ten times as long
    candidates = selection.candidates[sparse]
    places, table_width = np.flatnonzero(candidates), candidates.shape[1]
    spans = np.arange(len(sparse)).repeat(np.count_nonzero(candidates, axis=1))
    blocks = block_tables[sparse].take(places).astype(np.int64)
    # tables are as wide as the step needs; places are relative to the width of the longest request
    places += spans * (selection.width - table_width)
    counts = selection.counts[sparse]
    ends = counts.cumsum()
    num_drafts = np.int64(0) if selection.num_drafts is None else selection.num_drafts[sparse]
    choice_spans = np.arange(len(sparse)).repeat(counts)
    ranks = np.arange(len(choice_spans)) - (ends - counts).repeat(counts)
    modes = selection.modes[sparse]
    return SelectionPlan(
        first_rows=first_rows,
        num_rows=num_rows,
        scored_rows=first_rows + num_rows - 1 - num_drafts,
        ranked_rows=num_rows * (modes != REUSE),
        row_steps=np.where(is_tile, selection.row_step, 1),
        modes=modes,
        counts=counts,
        thresholds=selection.thresholds[sparse],
        choice_slots=selection.slots[sparse],
        candidate_blocks=blocks,
        candidate_spans=spans,
        candidate_places=places,
        choice_places=choice_spans * selection.most + ranks,
        choice_spans=choice_spans,
        choice_hi=np.full(len(choice_spans), block_size, np.int64),
    )


def moved_selection(plan: SelectionPlan, selection: SelectionInput, requests: NDArray[np.int64]) -> SelectionPlan:
    """Returns the plan of a step whose requests choose from the same blocks, without tiles, in other modes."""
    sparse = requests[selection.modes[requests] != DENSE]
    num_drafts = np.int64(0) if selection.num_drafts is None else selection.num_drafts[sparse]
    modes = selection.modes[sparse]
    return plan._replace(
        scored_rows=plan.first_rows + plan.num_rows - 1 - num_drafts,
        ranked_rows=plan.num_rows * (modes != REUSE),
        modes=modes,
        thresholds=selection.thresholds[sparse],
    )


def _tiles(
    flat: NDArray[np.int64], first_rows: NDArray[np.int64], num_rows: NDArray[np.int64], tile_rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Divides the rows of each request into tiles; returns the request, first row and number of rows of each."""
    sizes = np.where(tile_rows > 0, tile_rows, num_rows)
    counts = -(-num_rows // sizes)
    sizes, number = sizes.repeat(counts), np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
    begin = number * sizes
    return flat.repeat(counts), first_rows.repeat(counts) + begin, np.minimum(sizes, num_rows.repeat(counts) - begin)
