"""Divides a step that no bucket holds: requests of a step do not depend on each other's rows."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import BatchInput


def divide_batch(
    batch: BatchInput, block_size: int, max_shared_blocks: int, alone: Collection[int] = ()
) -> list[NDArray[np.int64]]:
    """Indices of requests that fit one step each: one group, unless contexts have too many shared blocks, or a request
    has to run `alone` (indices into the batch).

    Requests keep their order: vLLM lets a request find blocks in the cache that one scheduled before it fills in the
    same step, and those that use the same blocks mostly stay together. Each group takes as many as fit; a request alone
    always does (`Limits` makes sure).
    """
    if not len(alone):
        return _divide_by_blocks(batch, block_size, max_shared_blocks)
    apart, groups = set(alone), []
    # a request that runs alone is a run of its own, whatever its neighbours are
    for number, run in groupby(range(len(batch.num_scheduled)), lambda index: index if index in apart else -1):
        index = np.array(list(run))
        if number in apart:
            groups.append(index)
        else:
            groups += [index[group] for group in _divide_by_blocks(batch.take(index), block_size, max_shared_blocks)]
    return groups


def _divide_by_blocks(batch: BatchInput, block_size: int, max_shared_blocks: int) -> list[NDArray[np.int64]]:
    everything = np.arange(len(batch.num_scheduled))
    tokens = batch.num_computed + (batch.num_scheduled == 1)
    num_blocks = -(-tokens // block_size)
    if int(num_blocks.sum()) <= max_shared_blocks:
        return [everything]
    if _shared_blocks(batch, num_blocks) <= max_shared_blocks:
        return [everything]
    groups: list[list[int]] = [[]]
    use = _Use(set(), set())
    for index in everything.tolist():
        blocks = set(batch.block_tables[index, : num_blocks[index]].tolist())
        rows = int(batch.num_scheduled[index])
        shared = use.newly_shared(blocks, rows)
        if groups[-1] and len(use.shared) + len(shared) > max_shared_blocks:
            groups.append([])
            use = _Use(set(), set())
            shared = use.newly_shared(blocks, rows)
        groups[-1].append(index)
        use.shared.update(shared)
        use.any.update(blocks)
    return [np.array(group) for group in groups]


class _Use(NamedTuple):
    """Blocks that the requests of a group use: any of them, and those that more than one row does."""

    any: set[int]
    shared: set[int]

    def newly_shared(self, blocks: set[int], rows: int) -> set[int]:
        """Which become shared once a request of so many rows uses `blocks` as well."""
        return (blocks if rows > 1 else blocks & self.any) - self.shared


def _shared_blocks(batch: BatchInput, num_blocks: NDArray[np.int32]) -> int:
    """Distinct blocks that more than one row uses: all of a request with several rows, and those of two requests."""
    column = np.arange(batch.block_tables.shape[1])
    used = batch.block_tables[column < num_blocks[:, None]]
    several = np.repeat(batch.num_scheduled > 1, num_blocks)
    blocks, counts = np.unique(used, return_counts=True)
    return int(((counts > 1) | np.isin(blocks, used[several])).sum())
