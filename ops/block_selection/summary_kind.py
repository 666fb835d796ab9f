"""What is kept of the keys of a full block, so that a query can tell from it how much attention the block would get."""

from __future__ import annotations

from enum import StrEnum
from math import gcd

import torch

BITS_PER_BYTE = 8
# A code of one bit per element, of sixteen boxes, takes about the bytes of one mean in bf16.
_BOXES = {"box_mean": 4, "hash": 16}


class SummaryKind(StrEnum):
    """How a block is summarised; the value is the option's.

    MEAN: the mean key. MINMAX: the smallest and the largest value of each element (Quest). BOX_MEAN: a mean for each of
    4 runs of tokens. HASH: a sign code and a gain for each of 16 runs of tokens.
    """

    MEAN = "mean"
    MINMAX = "minmax"
    BOX_MEAN = "box_mean"
    HASH = "hash"

    def vectors(self, block_size: int) -> int:
        """Vectors per block and kv head: runs of tokens are of equal length, so there may be fewer in an odd block."""
        if self is SummaryKind.MINMAX:
            return 2
        return gcd(block_size, _BOXES.get(self.value, 1))

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
