"""Shapes of the graphs for tails: the rest of a prompt that was loaded in part, up to a block of rows of one request.

An ordinary graph has room for the rows of a verification in each of its choices, because all of its selected blocks
are multiplied with as many rows. A tail has many more, but a single choice: so it runs alone, in one of three graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, dominates
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, LimitsError

# Contexts of so much of the longest have a graph of their own: most are far shorter than --max-model-len.
SHORT_SHARE = 4
MOST_TAILS = 3
"""Shapes of a server."""


def tail_rows(block_size: int, max_num_batched_tokens: int, most_rows: int) -> int:
    """Rows of the graphs for tails; 0 where ordinary ones, with room for `most_rows` in a choice, hold every tail."""
    rows = min(block_size, max_num_batched_tokens)
    return rows if rows > most_rows else 0


class TailShape(NamedTuple):
    """What a graph for tails is found by. A bucket of the same sizes is another graph: its choices have fewer rows."""

    forward: ForwardShape


class TailShapes:
    """All of a server, the smallest first; the last one holds every tail.

    Rows are padded to a block of them: so few cost what reading the weights costs. A tail has no unique blocks, as
    all of its rows see the same. With requests of up to 32768 tokens attention takes 41, 138 and 419 us per layer in
    them (Llama 3.1 8B, blocks of 128, Gaudi 2; modelled, without the scores).

    Args:
        limits: of the server's steps.
        rows: most of a tail.
        live_blocks: most blocks of a request that are attended in any case.
        most_selected: blocks that the longest request chooses.
    """

    def __init__(self, limits: Limits, rows: int, live_blocks: int, most_selected: int) -> None:
        self.limits = replace(
            limits,
            max_num_batched_tokens=rows,
            max_num_seqs=1,
            max_shared_blocks=None,
            max_selected_blocks=most_selected,
        )
        """Of a step that is one tail."""
        every = self.limits.most_shared_blocks
        live = min(every, live_blocks)
        # the last one for blocks that wait for their summaries: these are attended without being chosen
        sizes = (live, -(-most_selected // SHORT_SHARE)), (live, most_selected), (every, most_selected)
        found = (ForwardShape.of(True, rows, shared, 0, selected) for shared, selected in sizes)
        self.keys = tuple(map(TailShape, dict.fromkeys(found)))

    def lookup(self, step: Bucket) -> ForwardShape:
        """The smallest that dominates the step. Raises LimitsError for one that is no tail of the server."""
        for shape in self.shapes:
            if dominates(shape.step(step.logits), step):
                return shape
        raise LimitsError(f"step {step.to_list()} exceeds the graphs for tails, {[s.to_list() for s in self.shapes]}")

    @property
    def shapes(self) -> list[ForwardShape]:
        return [key.forward for key in self.keys]
