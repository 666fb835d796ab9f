"""What is kept of the keys of a full block, so that a query can tell from it how much attention the block would get."""

from __future__ import annotations

from enum import StrEnum

import torch

BITS_PER_BYTE = 8
# Boxes of a block, all but one of a single key: at least so many, and more in larger blocks. With a fixed number a
# look-up in a block of 128 tokens failed in a quarter of cases; with one for eight tokens in none of 128.
_LEAST_BOXES = {"box_mean": 4, "hash": 8}
_TOKENS_PER_BOX = 8


class SummaryKind(StrEnum):
    """How a block is summarised; the value is the option's.

    MEAN: the mean key. MINMAX: the smallest and the largest value of each element (Quest). BOX_MEAN: the keys that are
    farthest from the mean, one by one, and the mean of the rest. HASH: more of these, as a sign code and a gain each.
    """

    MEAN = "mean"
    MINMAX = "minmax"
    BOX_MEAN = "box_mean"
    HASH = "hash"

    def vectors(self, block_size: int) -> int:
        """Vectors per block and kv head; a small block has no more than keys."""
        if self is SummaryKind.MEAN:
            return 1
        if self is SummaryKind.MINMAX:
            return 2
        return min(block_size, max(_LEAST_BOXES[self.value], block_size // _TOKENS_PER_BOX))

    def width(self, dim: int) -> int:
        """Elements per vector: those of a key, or the bytes of a code and one for its gain."""
        return -(-dim // BITS_PER_BYTE) + 1 if self is SummaryKind.HASH else dim

    def shape(self, num_blocks: int, block_size: int, kv_heads: int, dim: int) -> tuple[int, int, int, int]:
        """[num_blocks, vectors, kv_heads, width] of the summaries of one layer."""
        return num_blocks, self.vectors(block_size), kv_heads, self.width(dim)

    @property
    def dtype(self) -> torch.dtype:
        """What summaries are computed in; those of floats may be kept in a narrower float, as the keys are."""
        return torch.uint8 if self is SummaryKind.HASH else torch.float32
