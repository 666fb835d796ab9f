"""How many slots attention reads at once."""

from __future__ import annotations

# Gaudi's vectors are 128 bf16 wide (gaudi-api.md), and fewer blocks make planning cheaper everywhere.
DEFAULT_BLOCK_SIZE = 128


def tile_size(given: int | None) -> int:
    """Slots of a tile, where each token has a slot of its own. given: `--block-size`; 1, which is vLLM's own size then,
    and nothing stand for the default."""
    return given if given not in (None, 1) else DEFAULT_BLOCK_SIZE
