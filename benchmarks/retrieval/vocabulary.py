"""The tokens of the retrieval task: a few markers, symbols (keys and values), and filler."""

from __future__ import annotations

VOCABULARY = 512
END = 0
BEGIN = 1
RECORD = 2
QUERY = 3
FIRST_SYMBOL = 4
NUM_SYMBOLS = 384
FIRST_FILLER = FIRST_SYMBOL + NUM_SYMBOLS
