"""The block tables of the live requests in one KV-cache group, with a row per request."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockTable:
    """Physical block ids of each request, in the order of its context.

    A group with a window frees blocks that no row sees any more. vLLM gives a new request the null block in their
    place, but does not report the change for a running request: the stale entries in its row are not read (`Window`).

    Args:
        num_rows: number of requests to begin with.
        width: blocks of the longest request.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self.blocks = np.zeros((num_rows, width), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        start = self.num_blocks[row]
        self.blocks[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)

    def clear(self, row: int) -> None:
        self.num_blocks[row] = 0

    def blocks_of(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Returns [requests, width] the blocks of some requests, in the form of a BatchInput."""
        found: NDArray[np.int32] = self.blocks[rows, : int(self.num_blocks[rows].max(initial=0))]
        return found

    def grow(self, num_rows: int) -> None:
        more = BlockTable(num_rows - len(self.num_blocks), self.blocks.shape[1])
        self.blocks = np.concatenate([self.blocks, more.blocks])
        self.num_blocks = np.concatenate([self.num_blocks, more.num_blocks])


def has_same_blocks(old: NDArray[np.int32], new: NDArray[np.int32], num_blocks: NDArray[np.int64]) -> bool:
    """Returns whether the first blocks of each request are the same in two tables, [requests, width] each.

    num_blocks: [requests] number of blocks to compare, at most the old width.
    """
    width = old.shape[1]
    if len(old) != len(new) or new.shape[1] < width:
        return False
    rows, columns = (new[:, :width] != old).nonzero()
    return not len(rows) or bool((columns >= num_blocks[rows]).all())
