"""How many shared blocks the largest bucket has where nobody says it."""

from __future__ import annotations

# The largest graph multiplies all rows with all shared blocks, while the contexts of several prompts have few pairs in
# common. Two long contexts fit one step; more are rare, and such a step runs in parts.
SHARED_CONTEXTS = 2


def default_shared_blocks(max_model_len: int, block_size: int) -> int:
    """The blocks of SHARED_CONTEXTS requests of `max_model_len` tokens."""
    return SHARED_CONTEXTS * -(-max_model_len // block_size)
