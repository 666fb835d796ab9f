"""How much of a step the hpu implementation takes in one go: what a tile makes should stay in the card's SRAM.

Gaudi 2 has 48 MB of it, Gaudi 3 96 MB. Sizes depend on shapes alone, so they are the same for every step of a bucket.
Larger tiles mean fewer operators to compile; `gaudi-ucm op-cost` shows what they cost in memory traffic.
"""

from __future__ import annotations

from torch import Tensor

# The matrix engine works on 128 x 128.
TILE = 128
# float32 scores of one tile; softmax has a few tensors of that size at a time.
SCORE_BYTES = 8 << 20
# Keys and values of one tile as they lie in the cache; they are there once more as gathered, or put in order.
KV_BYTES = 16 << 20
# Keys and values of slices that lie side by side: they stay while all rows of the slices are computed.
SLICE_BYTES = 8 << 20
# float32 results of blocks that wait for their reduction to rows.
PIECE_BYTES = 16 << 20
# Rows that read a tile of shared blocks together, and rows of a causal tile at most.
MOST_ROWS = 512


def score_tokens(heads: int, rows: int) -> int:
    """Tokens that so many rows are multiplied with at a time, a multiple of TILE."""
    return max(TILE, SCORE_BYTES // (4 * heads * max(1, rows)) // TILE * TILE)


def kv_tokens(key: Tensor, value: Tensor) -> int:
    """Tokens of keys and values [..., kv_heads, dim] that are read at a time."""
    return max(1, KV_BYTES // _token_bytes(key, value))


def slice_tokens(key: Tensor, value: Tensor) -> int:
    """Tokens of all slices that lie side by side."""
    return max(1, SLICE_BYTES // _token_bytes(key, value))


def _token_bytes(key: Tensor, value: Tensor) -> int:
    return key.shape[-2] * (key.shape[-1] + value.shape[-1]) * key.element_size()


def block_tile(key_cache: Tensor, value_cache: Tensor, heads: int, rows: int = 1) -> int:
    """Blocks, each multiplied with `rows` rows of its own, that are computed at a time."""
    block_size = key_cache.shape[1]
    scores = SCORE_BYTES // (4 * heads * rows * block_size)
    return max(1, min(scores, kv_tokens(key_cache, value_cache) // block_size))


def piece_blocks(heads: int, value_dim: int, rows: int = 1) -> int:
    """Blocks whose results are reduced to rows at a time."""
    return max(1, PIECE_BYTES // (4 * heads * value_dim * rows))


def causal_rows(slice_rows: int, slice_keys: int) -> int:
    """Rows of a causal tile. The square at its end is half wasted, so it is an eighth of the keys or less, if it can.

    More rows read the keys less often.
    """
    rows = slice_keys // 8 // TILE * TILE
    return min(slice_rows, max(TILE, min(MOST_ROWS, rows)))
