"""Shapes of the graphs for prompt remainders: rows of a prompt that choose blocks of the context before them. These are
the last rows of a partly loaded prompt, up to a block, or a chunk of a sparse prompt, whose rows choose in tiles.

In an ordinary graph every selection has room for the rows of a verification, since all selected blocks are multiplied
with the same number of rows. A prompt remainder has many more rows, but a single selection, or one for each tile. So it
runs in a step of its own, in one of up to three graphs, or six with tiles.
"""

from dataclasses import replace
from typing import NamedTuple

from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, dominates
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, LimitsError

# Contexts of up to a quarter of the longest have a graph of their own: most are far shorter than --max-model-len.
SHORT_SHARE = 4
# Chunks of up to a quarter of the largest have graphs of their own: the last one of a prompt is mostly shorter.
SHORT_ROWS = 4
_CONTEXTS, _LENGTHS = 3, 2


def most_remainders(tiles: bool) -> int:
    """Returns the most shapes of a server. tiles: whether chunks of prompts choose (`prompt_ratio`)."""
    return _CONTEXTS * (_LENGTHS if tiles else 1)


def remainder_rows(block_size: int, max_num_batched_tokens: int, most_rows: int, tiles: bool = False) -> int:
    """Returns the rows of the largest prompt remainder; 0 if ordinary graphs hold them all.

    most_rows: rows of a selection in ordinary graphs. tiles: whether chunks of prompts choose.
    """
    if tiles:
        return max_num_batched_tokens
    rows = min(block_size, max_num_batched_tokens)
    return rows if rows > most_rows else 0


class RemainderShape(NamedTuple):
    """The key of a graph for prompt remainders. A bucket of equal sizes is another graph: fewer rows per selection."""

    forward: ForwardShape


class RemainderShapes:
    """All shapes of a server, the smallest first; the last one holds every prompt remainder.

    Rows are padded to a block, which costs less than reading the weights. There are no unique blocks, because all rows
    belong to one request. With requests of up to 32768 tokens, attention takes 41, 138 and 419 us per layer in these
    graphs (Llama 3.1 8B, blocks of 128, Gaudi 2; modelled, without the scores).

    Args:
        rows: rows of the longest prompt remainder.
        live_blocks: most blocks of a request that are always attended.
        most_selected: selected blocks of the longest request, or of a tile.
        tile_rows: rows of a tile; 0: all rows choose together.
    """

    def __init__(self, limits: Limits, rows: int, live_blocks: int, most_selected: int, tile_rows: int = 0) -> None:
        def tiles(count: int) -> int:
            return -(-count // tile_rows) if tile_rows else 1

        self.limits = replace(
            limits,
            max_num_batched_tokens=rows,
            max_num_seqs=1,
            max_shared_blocks=None,
            max_selected_blocks=most_selected * tiles(rows),
        )
        """The limits of a step that is one prompt."""
        every = self.limits.most_shared_blocks
        live = min(every, live_blocks)
        # the last one is for blocks that wait for their summaries: these are attended without being selected
        sizes = (live, -(-most_selected // SHORT_SHARE)), (live, most_selected), (every, most_selected)
        lengths = (-(-rows // SHORT_ROWS), rows) if tile_rows else (rows,)
        found = (
            ForwardShape.from_sizes(True, length, shared, 0, selected * tiles(length))
            for length in lengths
            for shared, selected in sizes
        )
        self.keys = tuple(map(RemainderShape, dict.fromkeys(found)))

    def lookup(self, step: Bucket) -> ForwardShape:
        """Returns the smallest shape that dominates the step. Raises LimitsError if no graph holds it."""
        for shape in self.shapes:
            if dominates(shape.step(step.logits), step):
                return shape
        raise LimitsError(
            f"step {step.to_list()} exceeds the graphs for prompt remainders, {[s.to_list() for s in self.shapes]}"
        )

    @property
    def shapes(self) -> list[ForwardShape]:
        return [key.forward for key in self.keys]
