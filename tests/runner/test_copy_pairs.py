"""What connectors with buffers on the host copy blocks with."""

from __future__ import annotations

import torch

from vllm_gaudi_ucm.kv_cache.pair import KvPair, in_blocks
from vllm_gaudi_ucm.runner.kv_transfer import copy_pairs

BLOCK_SIZE = 2


def pairs(blocks: int, fill: float | None = None) -> dict[str, KvPair]:
    """Two layers of different shapes, as a model and its draft model have."""
    shapes = {"target": ((2, 3), (2, 4)), "draft": ((1, 5), (1, 5))}
    return {
        name: KvPair(*(torch.randn(blocks * BLOCK_SIZE, *shape).mul_(1 if fill is None else fill) for shape in both))
        for name, both in shapes.items()
    }


def test_blocks_of_keys_and_values_go_to_their_places() -> None:
    sources, targets = pairs(4), pairs(3, fill=0)
    copy_pairs(BLOCK_SIZE, sources, targets, [3, 1], [0, 2], "d2h")
    for name, pair in targets.items():
        for found, source in zip(in_blocks(pair, BLOCK_SIZE), in_blocks(sources[name], BLOCK_SIZE), strict=True):
            assert torch.equal(found[[0, 2]], source[[3, 1]])
            assert not found[1].any()
