"""How many blocks are copied together where each number of them is compiled once."""

from __future__ import annotations

MOST_TOGETHER = 16
"""Blocks of one copy on a Gaudi: five recipes, and a temporary of so many blocks of one layer."""


def copy_sizes(count: int, most: int) -> list[int]:
    """`count` as powers of two up to `most`, itself one, the largest first: few copies, of few sizes, and no pads."""
    sizes = [most] * (count // most)
    rest = count % most
    return sizes + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]


def largest_size(num_blocks: int) -> int:
    """Of a copy in a cache of so many blocks, whose sources and targets are different ones."""
    room = max(1, min(MOST_TOGETHER, num_blocks // 2))
    return 1 << (room.bit_length() - 1)
