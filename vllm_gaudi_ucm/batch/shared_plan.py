"""Cached blocks that more than one row uses, gathered into groups of blocks with equal users."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.context_pairs import ContextPairs, SharedPairs

Group = tuple[NDArray[np.int64], int, int]


class SharedPlan(NamedTuple):
    """Cached blocks that more than one row uses: token ranges by (request, block), and sets of rows with equal blocks.

    blocks: int64 [blocks] physical block ids, in the order of first use by the flat requests, except that the blocks of
        a group stand together.
    lo, hi: int32 [requests, blocks] the rows of a request see tokens [lo, hi) of a block; hi 0: they do not use it.
    groups: `(rows, block_lo, block_hi)`: exactly the rows that use `blocks[block_lo:block_hi]`. No two groups have the
        same rows.
    """

    blocks: NDArray[np.int64]
    lo: NDArray[np.int32]
    hi: NDArray[np.int32]
    groups: list[Group]


class _Blocks(NamedTuple):
    """Shared blocks; the users of block i are the requests `users[first[i]:first[i] + num_users[i]]`, ascending."""

    first: NDArray[np.int64]
    num_users: NDArray[np.int64]
    users: NDArray[np.int64]

    def users_of(self, index: int) -> NDArray[np.int64]:
        return self.users[self.first[index] : self.first[index] + self.num_users[index]]


def plan_shared(
    pairs: ContextPairs, shared: SharedPairs, query_start: NDArray[np.int64], room: int = 0
) -> SharedPlan | None:
    """Groups the shared pairs.

    Multiplying every row with every shared block would cost rows x blocks where the batch is block-sparse (several
    prompts with a context of their own each); with groups the cost follows the pairs in use.

    Args:
        pairs: all pairs of the step.
        shared: the shared ones among them.
        query_start: [requests + 1] first row of each request in flat order.
        room: blocks that the caller puts before these; until then they are nobody's.
    """
    pair, block = shared
    if not pair.size:
        return None
    request = pairs.request.take(pair)
    first, count = _runs(block[1:] != block[:-1])
    by_use = pair[first].argsort()
    place, groups = _group(_Blocks(first[by_use], count[by_use], request), query_start)
    if room:
        groups = [(rows, begin + room, end + room) for rows, begin, end in groups]
    column = np.empty_like(first)
    column[by_use] = place + room
    total = room + len(first)
    # zeros, not zeros_like: a large one comes from the system as zeros, and what nobody uses of it stays untouched
    hi = np.zeros((len(query_start) - 1, total), np.int32)
    hi.reshape(-1)[request * total + column.repeat(count)] = pairs.hi.take(pair)
    blocks = np.zeros(total, np.int64)
    blocks[column] = block[first]
    return SharedPlan(blocks, np.zeros(hi.shape, np.int32), hi, groups)


def _group(blocks: _Blocks, query_start: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[Group]]:
    """Places blocks so that those with the same users stand together.

    The blocks of a prefix are neighbours in the order of first use, so runs of blocks with equal users are found by
    comparing neighbours, all at once; only runs are looked at one by one. Runs with equal users that are no neighbours
    exist where requests share crosswise.

    Returns:
        The place of each block, and the groups.
    """
    starts, lengths = (array.tolist() for array in _runs(_new_users(blocks)))
    runs_of: dict[bytes, list[int]] = {}
    for run, start in enumerate(starts):
        runs_of.setdefault(blocks.users_of(start).tobytes(), []).append(run)
    place = np.arange(len(blocks.first))
    groups: list[Group] = []
    end = 0
    for runs in runs_of.values():
        begin = end
        for run in runs:
            place[starts[run] : starts[run] + lengths[run]] += end - starts[run]
            end += lengths[run]
        groups.append((_rows(blocks.users_of(starts[runs[0]]), query_start), begin, end))
    return place, groups


def _new_users(blocks: _Blocks) -> NDArray[np.bool_]:
    """[blocks - 1] whether the users of block i + 1 are others than those of block i."""
    count = blocks.num_users
    lowest, highest = blocks.users[blocks.first], blocks.users[blocks.first + count - 1]
    differs = (count[1:] != count[:-1]) | (lowest[1:] != lowest[:-1])
    if np.array_equal(highest - lowest, count - 1):  # users without gaps: lowest and number say it all
        return differs
    begin = count.cumsum() - count
    index = np.arange(len(blocks.users))
    users = blocks.users.take(index + (blocks.first - begin).repeat(count))
    # where the block before has another number of users this compares anything, but then it does not matter
    before = users.take(index - count.repeat(count))
    return differs | np.logical_or.reduceat(users != before, begin)[1:]


def _runs(changes: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and lengths of runs in an array of which entry i + 1 begins a new one where `changes[i]`."""
    bounds = np.empty(np.count_nonzero(changes) + 2, np.int64)
    bounds[0], bounds[-1] = 0, len(changes) + 1
    bounds[1:-1] = changes.nonzero()[0]
    bounds[1:-1] += 1
    return bounds[:-1], bounds[1:] - bounds[:-1]


def _rows(users: NDArray[np.int64], query_start: NDArray[np.int64]) -> NDArray[np.int64]:
    """All rows of ascending requests."""
    last = users[-1]
    if query_start[last + 1] == last + 1:  # as many rows as requests up to here, so each has one
        return users
    if len(users) == 1:
        return np.arange(query_start[last], query_start[last + 1])
    start = query_start[users]
    count = query_start[users + 1] - start
    end = count.cumsum()
    return np.arange(end[-1]) + (start - (end - count)).repeat(count)
