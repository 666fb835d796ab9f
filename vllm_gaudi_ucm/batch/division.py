"""Divides a step into parts that fit the largest bucket."""

from collections.abc import Collection
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import BatchInput
from vllm_gaudi_ucm.batch.block_use import Room, fitting_groups
from vllm_gaudi_ucm.batch.token_runs import run_pairs
from vllm_gaudi_ucm.batch.window import Window, blocks_before


def divide_batch(
    batch: BatchInput, block_size: int, room: Room, alone: Collection[int] = (), window: Window | None = None
) -> list[NDArray[np.int64]]:
    """Returns indices of requests for each part that fits one step: one group, unless contexts have too many shared
    blocks or ranges, or a request must run `alone` (indices into the batch).

    Requests keep their order: vLLM lets a request find blocks in the cache that a request scheduled before it fills in
    the same step, and requests that use the same blocks mostly stay together. Each group takes as many as fit; a single
    request always fits (`Limits` ensures this).
    """
    if not len(alone):
        return _divide(batch, block_size, room, window)
    apart, groups = set(alone), []
    # a request that runs alone is a separate run, whatever its neighbours are
    for number, run in groupby(range(len(batch.num_scheduled)), lambda index: index if index in apart else -1):
        index = np.array(list(run))
        if number in apart:
            groups.append(index)
        else:
            groups += [index[group] for group in _divide(batch.take(index), block_size, room, window)]
    return groups


def _divide(batch: BatchInput, block_size: int, room: Room, window: Window | None) -> list[NDArray[np.int64]]:
    everything = np.arange(len(batch.num_scheduled))
    contexts = _ranges(batch, block_size) if batch.has_token_tables else None
    if contexts is None:
        before, end = _columns(batch, block_size, window)
        # the blocks of most steps fit, whichever they are
        if int((end - before).sum()) <= room.shared_blocks:
            return [everything]
        contexts = _blocks(batch, before, end)
        room = room._replace(ranges=len(contexts.keys))
    elif len(contexts.keys) <= min(room):
        return [everything]
    several = np.repeat(batch.num_scheduled > 1, contexts.counts)
    keys, users = np.unique(contexts.keys, return_counts=True)
    shared_blocks = int(((users > 1) | np.isin(keys, contexts.keys[several])).sum())
    if shared_blocks <= room.shared_blocks and len(keys) <= room.ranges:
        return [everything]
    parts = np.split(contexts.keys, contexts.counts.cumsum()[:-1])
    return [np.array(group) for group in fitting_groups(parts, batch.num_scheduled, room)]


class _Contexts(NamedTuple):
    """Blocks of cached contexts. keys: [pairs] blocks, or first slots of ranges, by request. counts: of each."""

    keys: NDArray[np.integer]
    counts: NDArray[np.int64]


def _cached_tokens(batch: BatchInput) -> NDArray[np.int64]:
    return batch.num_computed.astype(np.int64) + (batch.num_scheduled == 1)


def _ranges(batch: BatchInput, block_size: int) -> _Contexts:
    tokens = _cached_tokens(batch)
    pairs = run_pairs(tokens, np.arange(len(tokens)), batch.block_tables, block_size)
    return _Contexts(pairs.key, np.bincount(pairs.request, minlength=len(tokens)))


def _columns(batch: BatchInput, block_size: int, window: Window | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns int64 [requests] each: the first column of the table that is seen, and the one behind the last."""
    tokens = _cached_tokens(batch)
    end = -(-tokens // block_size)
    if window is None:
        return np.zeros_like(end), end
    return blocks_before(window.first_seen(batch.num_computed.astype(np.int64)), tokens, block_size), end


def _blocks(batch: BatchInput, before: NDArray[np.int64], end: NDArray[np.int64]) -> _Contexts:
    """before, end: see `_columns`."""
    column = np.arange(batch.block_tables.shape[1])
    used = (column >= before[:, None]) & (column < end[:, None])
    return _Contexts(batch.block_tables[used], end - before)
