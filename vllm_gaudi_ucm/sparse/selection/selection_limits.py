"""Sizes that bound the choices of a sparse method, from which graphs know how much room they need."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Rows of a tile whose queries score blocks, evenly spread over the tile. Scores of all rows would cost as much as the
# attention to the blocks that a choice leaves out. A verification has at most as many rows, which all score.
SCORED_ROWS = 32


class PromptTiles(NamedTuple):
    """Prompts whose rows choose in tiles. rows: of a tile. ratio: part of the full blocks that is attended. most:
    blocks that a tile chooses in the longest context.
    """

    rows: int
    ratio: float
    most: int

    @property
    def row_step(self) -> int:
        """Returns the step from one row of a tile that scores blocks to the next one."""
        return -(-self.rows // SCORED_ROWS)


@dataclass(frozen=True)
class SelectionLimits:
    """Sizes that bound every choice.

    sparse_ratio: the least fraction of a context's full blocks that is attended.
    live_blocks: the most blocks of a request that are always attended: sinks, local window and the tail block.
    most: blocks chosen for the longest request.
    width: logical blocks of the longest request.
    max_rows: rows of a request with a choice: one, and its drafts.
    max_selected_blocks: blocks chosen in a step; a request that would exceed it is dense in that step.
    remainder_rows: rows of a prompt remainder that choose together in a separate graph; 0: there is no such graph.
    max_spans: requests or tiles with a choice for which a graph has room; None: all requests of a step.
    tiles: of prompts that choose; None: prompts are dense.
    """

    sparse_ratio: float
    live_blocks: int
    most: int
    width: int
    max_num_seqs: int
    max_rows: int
    max_selected_blocks: int
    block_size: int
    remainder_rows: int = 0
    max_spans: int | None = None
    tiles: PromptTiles | None = None

    @property
    def room_for_live_blocks(self) -> int:
        """Returns the room for a request's live blocks in a graph: one more than usual, for a reused window."""
        return self.live_blocks + 1

    @property
    def scored_rows(self) -> int:
        """Returns the most rows of a span that score blocks."""
        return self.max_rows if self.tiles is None else min(self.max_rows, SCORED_ROWS)

    def most_candidates(self, selected: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the most candidates of requests that choose `selected` blocks, `sparse_ratio` with live ones."""
        bound = np.floor((selected + self.live_blocks) / self.sparse_ratio).astype(np.int64)
        return np.minimum(self.width, np.maximum(selected, bound))

    def candidates(self, query_len: int, selected: int) -> int:
        """Returns the candidates of all requests of a step with `query_len` rows and `selected` chosen blocks."""
        spans = min(self.spans(query_len) - 1, selected)
        bound = math.floor((selected + spans * self.live_blocks) / self.sparse_ratio)
        return min(spans * self.width, max(selected, bound))

    def spans(self, query_len: int) -> int:
        """Returns the requests of a step with a choice, and one more without rows, for pads."""
        return min(query_len, self.max_spans or self.max_num_seqs) + 1

    def summaries(self, query_len: int) -> int:
        """Returns the blocks that are summarised in a step: on average rows / block size become full in it."""
        return -(-query_len // self.block_size) + 1

    def of_remainder(self) -> SelectionLimits:
        """Returns the limits of the graphs for prompt remainders: one request with many rows, or their tiles."""
        if self.tiles is None:
            return replace(self, max_rows=self.remainder_rows, max_spans=1)
        spans = -(-self.remainder_rows // self.tiles.rows)
        return replace(self.of_tiles(), max_rows=min(self.tiles.rows, self.remainder_rows), max_spans=spans)

    @property
    def row_step(self) -> int:
        """Returns the step from one row of a prompt's tile that scores blocks to the next one."""
        return 1 if self.tiles is None else self.tiles.row_step

    def of_tiles(self) -> SelectionLimits:
        """Returns the limits of the choices of prompts' tiles, each of which counts as a request."""
        assert self.tiles is not None, "prompts are dense"
        return replace(self, sparse_ratio=self.tiles.ratio)
