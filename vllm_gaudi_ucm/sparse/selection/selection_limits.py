"""How large the choices of a step can be: what the tensors of a graph are sized by."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class SelectionLimits:
    """Sizes that bound every choice.

    sparse_ratio: at least this part of a context's full blocks is attended.
    live_blocks: most blocks of a request that are attended in any case: sinks, local window and the tail.
    most: blocks chosen for the longest request.
    width: logical blocks of the longest request.
    max_num_seqs: requests of a step.
    max_rows: rows of a request with a choice: one, and its drafts.
    max_selected_blocks: blocks chosen in a step; a request that would exceed it is dense in that step.
    block_size: tokens per block.
    tail_rows: rows of a prompt's tail that choose together in a graph of their own; 0: there is no such graph.
    max_spans: requests with a choice that a graph has room for; None: all of a step.
    """

    sparse_ratio: float
    live_blocks: int
    most: int
    width: int
    max_num_seqs: int
    max_rows: int
    max_selected_blocks: int
    block_size: int
    tail_rows: int = 0
    max_spans: int | None = None

    def most_candidates(self, selected: int) -> int:
        """Candidates of a request that chooses so many: what is chosen and live is `sparse_ratio` of its blocks."""
        return min(self.width, max(selected, math.floor((selected + self.live_blocks) / self.sparse_ratio)))

    def candidates(self, query_len: int, selected: int) -> int:
        """Candidates of all requests of a step with so many rows and chosen blocks."""
        spans = min(self.spans(query_len) - 1, selected)
        bound = math.floor((selected + spans * self.live_blocks) / self.sparse_ratio)
        return min(spans * self.width, max(selected, bound))

    def spans(self, query_len: int) -> int:
        """Requests of a step with a choice, and one more without rows, for pads."""
        return min(query_len, self.max_spans or self.max_num_seqs) + 1

    def summaries(self, query_len: int) -> int:
        """Blocks that are summarised in a step: on average rows / block size become full in it."""
        return -(-query_len // self.block_size) + 1

    def of_tail(self) -> SelectionLimits:
        """Those of the graphs for tails: one request, whose rows are many."""
        return replace(self, max_rows=self.tail_rows, max_spans=1)
