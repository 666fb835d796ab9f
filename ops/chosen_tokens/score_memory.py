"""Estimates the memory that a choice of tokens in tiles of torch's operators needs, and bounds it by the size of tiles.

Does not import torch, so that plans are quick.
"""

ROWS = 64
"""Most rows of a tile."""
NUMBERS = 1 << 24
"""Most numbers of a tensor in between, unless a single row, or a block of keys, needs more."""
# Bytes alive for each score of a tile: scores and their copy, three masks, a running count, ranks, and slots.
ALIVE = 4 + 4 + 3 + 8 + 8 + 8
# Tensors of `NUMBERS` float32 alive in a product of heads or in attention: keys, products, weights.
PRODUCTS = 3
# Bytes for each token of a single row: its score, in three forms, and its slot.
OWN = 3 * 4 + 8


def rows_of_tile(tokens: int, rows: int, numbers: int) -> int:
    """Returns the rows whose scores over so many tokens are computed at a time."""
    return max(1, min(rows, numbers // max(1, tokens)))


def choice_bytes(rows: int, tokens: int, own: int, index_bytes: int) -> int:
    """Returns the most bytes that a choice, or the attention after it, allocates in one layer and still reads at one
    time.

    rows: of the step. tokens: shared tokens, new tokens, and a single row's. own: tokens of all single rows.
    index_bytes: of an indexer's key.
    """
    scores = min(rows, rows_of_tile(tokens, ROWS, NUMBERS)) * tokens
    return ALIVE * scores + PRODUCTS * 4 * NUMBERS + tokens * (index_bytes + 8) + own * OWN
