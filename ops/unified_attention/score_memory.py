"""What a step of the hpu implementation needs of the card's memory beside its inputs: what bounds a bucket's sizes.

A graph has few products whatever its sizes, so their operands grow with the bucket. A bucket that does not fit is too
large, and its steps are divided. Imports no torch, so that plans are quick.
"""

from __future__ import annotations

from dataclasses import dataclass

# Chunks of a causal step: 1.25 times the products of what is seen; each chunk is some ten operators of the graph.
MOST_CHUNKS = 4
# The same where new tokens are computed in tiles: these chunks bound memory and save nothing.
CHUNKS_BESIDE_TILES = 3
# The matrix engine works on 128 rows.
LEAST_ROWS = 128
WIDE = 4  # bytes of float32: scores, and keys as they are multiplied
# Tensors as large as the largest that exist at a time: scores, weights, and what these are multiplied as.
MOST_ALIVE = 3


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of a step. max_look_back: rows that a row of a causal step sees at most, where tiles bound it.

    shared, unique, selected: tokens of these blocks. selected_rows: rows of a request with chosen blocks.
    """

    heads: int
    kv_heads: int
    dim: int
    rows: int
    causal: bool = False
    shared: int = 0
    unique: int = 0
    selected: int = 0
    selected_rows: int = 1
    max_look_back: int | None = None


def attention_bytes(sizes: AttentionSizes) -> int:
    """Bytes of all that attention has made in one layer and still reads, at most, at one time."""
    return MOST_ALIVE * max(
        _rows_bytes(sizes), _block_bytes(sizes), _tile_bytes(sizes), sizes.rows * sizes.heads * sizes.dim * WIDE
    )


def _rows_bytes(sizes: AttentionSizes) -> int:
    """Scores of a chunk of rows, or the keys."""
    # beside chosen blocks: slices, as where nothing bounds how far rows look back
    tiled = sizes.max_look_back is not None and not sizes.selected
    keys = sizes.shared + (sizes.rows if sizes.causal and not tiled else 0)
    most = 1 if not sizes.causal else CHUNKS_BESIDE_TILES if tiled else MOST_CHUNKS
    chunk = -(-sizes.rows // max(1, min(most, sizes.rows // LEAST_ROWS)))
    return keys * max(chunk * sizes.heads, sizes.kv_heads * sizes.dim) * WIDE


def _block_bytes(sizes: AttentionSizes) -> int:
    """Scores, or keys, of all blocks that rows have of their own."""
    keys = sizes.kv_heads * sizes.dim
    if sizes.selected_rows == 1:
        return (sizes.unique + sizes.selected) * max(sizes.heads, keys) * WIDE
    selected = sizes.selected * max(sizes.selected_rows * sizes.heads, keys)
    return max(sizes.unique * max(sizes.heads, keys), selected) * WIDE


def _tile_bytes(sizes: AttentionSizes) -> int:
    """Scores if every row looked back as far as one may, or the keys of a tile; a spare tile in 32 and one more."""
    if not sizes.causal or sizes.max_look_back is None:
        return 0
    rows = sizes.rows + sizes.rows // 32 + 512
    return sizes.max_look_back * max(rows * sizes.heads, rows // 128 * sizes.kv_heads * sizes.dim) * WIDE
