"""Sizes that bound the choices of a sparse method, from which graphs know how much room they need."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


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
    max_spans: requests with a choice for which a graph has room; None: all of a step.
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

    @property
    def room_for_live_blocks(self) -> int:
        """Returns the room for a request's live blocks in a graph: one more than usual, for a reused window."""
        return self.live_blocks + 1

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
        """Returns the limits of the graphs for prompt remainders: one request with many rows."""
        return replace(self, max_rows=self.remainder_rows, max_spans=1)
