"""The number of slots that attention reads at once."""

# Gaudi's vectors are 128 bf16 wide, and fewer blocks make planning cheaper on every device.
DEFAULT_BLOCK_SIZE = 128


def tile_size(given: int | None) -> int:
    """Returns the slots of a tile, if each token has its own slot. given: `--block-size`; None and 1, which is then
    vLLM's own size, mean the default.
    """
    return given if given not in (None, 1) else DEFAULT_BLOCK_SIZE
