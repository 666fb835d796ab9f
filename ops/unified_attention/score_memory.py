"""Estimates the card's memory that a step of the hpu implementation needs in addition to its inputs, which bounds the
sizes of a bucket.

A graph has few products whatever its sizes, so their operands grow with the bucket. A bucket that does not fit is
refused, and its steps are divided. Does not import torch, so that plans are quick.
"""

from dataclasses import dataclass

# Chunks of a causal step: 1.25 times the necessary products; each chunk adds some ten operators to the graph.
MOST_CHUNKS = 4
# The same if new tokens are computed in tiles: these chunks bound memory but save no work.
CHUNKS_BESIDE_TILES = 3
# The matrix engine works on 128 rows.
LEAST_ROWS = 128
WIDE = 4  # bytes of float32: scores, and keys as they are multiplied
# Tensors as large as the largest that exist at a time: scores, weights, and their form in products.
MOST_ALIVE = 3


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of a step. max_look_back: the most rows that a row of a causal step sees, if tiles bound it.

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
    """Returns the most bytes that attention allocates in one layer and still reads at one time."""
    return MOST_ALIVE * max(
        _rows_bytes(sizes), _block_bytes(sizes), _tile_bytes(sizes), sizes.rows * sizes.heads * sizes.dim * WIDE
    )


def _rows_bytes(sizes: AttentionSizes) -> int:
    """Returns the bytes of the scores of a chunk of rows, or the keys."""
    # with chosen blocks: slices, as if no bound were known on how far rows look back
    tiled = sizes.max_look_back is not None and not sizes.selected
    keys = sizes.shared + (sizes.rows if sizes.causal and not tiled else 0)
    most = 1 if not sizes.causal else CHUNKS_BESIDE_TILES if tiled else MOST_CHUNKS
    chunk = -(-sizes.rows // max(1, min(most, sizes.rows // LEAST_ROWS)))
    return keys * max(chunk * sizes.heads, sizes.kv_heads * sizes.dim) * WIDE


def _block_bytes(sizes: AttentionSizes) -> int:
    """Returns the bytes of scores, or keys, of all blocks that belong to single rows."""
    keys = sizes.kv_heads * sizes.dim
    if sizes.selected_rows == 1:
        return (sizes.unique + sizes.selected) * max(sizes.heads, keys) * WIDE
    selected = sizes.selected * max(sizes.selected_rows * sizes.heads, keys)
    return max(sizes.unique * max(sizes.heads, keys), selected) * WIDE


def _tile_bytes(sizes: AttentionSizes) -> int:
    """Returns the bytes of scores of rows that look back as far as allowed, or of a tile's keys; plus spare tiles."""
    if not sizes.causal or sizes.max_look_back is None:
        return 0
    rows = sizes.rows + sizes.rows // 32 + 512
    return sizes.max_look_back * max(rows * sizes.heads, rows // 128 * sizes.kv_heads * sizes.dim) * WIDE
