"""Divides a step whose shared blocks exceed the largest bucket: requests of a step do not depend on each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.runner.batch_plan import BatchInput


def divide_batch(batch: BatchInput, block_size: int, max_shared_blocks: int) -> list[NDArray[np.int64]]:
    """Indices of requests that fit one step each: one group, unless contexts have too many blocks.

    Counts every cached block of a request as shared, which is never too few. Requests keep their order, so those that
    use the same blocks mostly stay together. A request alone always fits (`Limits` makes sure).
    """
    everything = np.arange(len(batch.num_scheduled))
    tokens = batch.num_computed + (batch.num_scheduled == 1)
    num_blocks = -(-tokens // block_size)
    if int(num_blocks.sum()) <= max_shared_blocks:
        return [everything]
    if _shared_blocks(batch, num_blocks) <= max_shared_blocks:
        return [everything]
    groups: list[list[int]] = [[]]
    used: set[int] = set()
    for index in everything.tolist():
        blocks = set(batch.block_tables[index, : num_blocks[index]].tolist())
        if groups[-1] and len(used | blocks) > max_shared_blocks:
            groups.append([])
            used = set()
        groups[-1].append(index)
        used |= blocks
    return [np.array(group) for group in groups]


def _shared_blocks(batch: BatchInput, num_blocks: NDArray[np.int32]) -> int:
    """Distinct blocks that more than one row uses: all of a request with several rows, and those of two requests."""
    column = np.arange(batch.block_tables.shape[1])
    used = batch.block_tables[column < num_blocks[:, None]]
    several = np.repeat(batch.num_scheduled > 1, num_blocks)
    blocks, counts = np.unique(used, return_counts=True)
    return int(((counts > 1) | np.isin(blocks, used[several])).sum())
