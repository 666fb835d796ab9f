"""Divides a step's cached blocks: shared ones, in groups with the same users, and blocks that only one row uses."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.context_pairs import ContextPairs, context_pairs
from vllm_gaudi_ucm.batch.window import WindowPlan

# A block id and the index of a pair share one 64-bit sorting key.
PAIR_BITS = 32
PAIR_MASK = (1 << PAIR_BITS) - 1


class SharedPairs(NamedTuple):
    """Pairs whose key more than one row uses, ordered by key, the pairs of a key in flat order.

    pair: int64 [shared] index into the pairs of the step. key: int64 [shared], see ContextPairs.
    """

    pair: NDArray[np.int64]
    key: NDArray[np.int64]


def shared_pairs(pairs: ContextPairs, num_single: int) -> SharedPairs:
    """Returns the pairs whose key more than one row uses.

    One sort of 64-bit keys finds equal keys and the order of their users at once. Its cost does not depend on the size
    of the keys, and a batch that shares nothing has no further cost.

    Args:
        pairs: all pairs of the step.
        num_single: requests [0, num_single) in flat order have one row; the blocks of all others have several rows
            anyway.
    """
    key = pairs.key.astype(np.int64)
    key <<= PAIR_BITS
    key |= np.arange(len(key))
    key.sort()
    again = (key[1:] ^ key[:-1]) <= PAIR_MASK
    any_multi = len(key) > 0 and bool(pairs.request[-1] >= num_single)
    if not (any_multi or np.count_nonzero(again)):
        return SharedPairs(key[:0], key[:0])
    shared = np.zeros(len(key), np.bool_)
    shared[1:] = again
    shared[:-1] |= again
    if any_multi:
        shared |= pairs.request.take(key & PAIR_MASK) >= num_single
    key = key[shared]
    return SharedPairs(key & PAIR_MASK, key >> PAIR_BITS)


Group = tuple[NDArray[np.int64], int, int]


class SharedPlan(NamedTuple):
    """Cached blocks that more than one row uses: token ranges by (request, block), and sets of rows with equal blocks.

    blocks: int64 [blocks] physical block ids, in the order of first use by the flat requests, except that the blocks of
        a group are adjacent.
    lo, hi: int32 [requests, blocks] the rows of a request see tokens [lo, hi) of a block; if hi is 0, they do not use
        it. Under a window lo may be below 0, and applies to the request's first row.
    groups: `(rows, block_lo, block_hi)`: exactly the rows that use `blocks[block_lo:block_hi]`. No two groups have the
        same rows.
    rise: int64 [rows], under a window: a row sees tokens from `lo + rise` on. If None, from lo on.
    """

    blocks: NDArray[np.int64]
    lo: NDArray[np.int32]
    hi: NDArray[np.int32]
    groups: list[Group]
    rise: NDArray[np.int64] | None = None

    @property
    def first_tokens(self) -> NDArray[np.int32]:
        """Returns int32 [blocks], the first token of a block that is seen: the same for all requests that use it."""
        found: NDArray[np.int32] = self.lo.max(axis=0)
        return found

    @property
    def most_of_request(self) -> int | None:
        """Returns the most blocks that a request uses; counted only under a window, when there are few of them."""
        return None if self.rise is None else int((self.hi > np.maximum(self.lo, 0)).sum(axis=1).max(initial=0))

    def pairs(self, row_requests: NDArray[np.int64]) -> int:
        """Returns the number of (row, token) products. row_requests: [rows] of a plan.

        It is counted group by group, because the table of requests and blocks is sparse if many requests have separate
        blocks.
        """
        found = 0
        for rows, begin, end in self.groups:
            requests, num_rows = row_requests[rows[:1]], np.array([len(rows)])
            if self.rise is not None:
                requests, num_rows = row_requests[rows], np.ones(len(rows), np.int64)
                lo = np.maximum(self.lo[requests, begin:end] + self.rise[rows, None], 0)
                found += int(np.maximum(self.hi[requests, begin:end] - lo, 0).sum())
                continue
            if row_requests[rows[-1]] != requests[0]:  # rows ascend
                requests, num_rows = np.unique(row_requests[rows], return_counts=True)
            seen = self.hi[requests, begin:end] - self.lo[requests, begin:end]
            found += int(seen.sum(axis=1) @ num_rows)
        return found


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

    Multiplying every row by every shared block would cost rows x blocks even if the batch is block-sparse (several
    prompts, each with a separate context); with groups the cost follows the pairs in use.

    Args:
        pairs: all pairs of the step.
        shared: the shared ones among them.
        query_start: [requests + 1] first row of each request in flat order.
        room: number of blocks that the caller puts before these; until then no request uses them.
    """
    pair, key = shared
    if not pair.size:
        return None
    request = pairs.request.take(pair)
    first, count = _runs(key[1:] != key[:-1])
    by_use = pair[first].argsort()
    place, groups = _group(_Blocks(first[by_use], count[by_use], request), query_start)
    if room:
        groups = [(rows, begin + room, end + room) for rows, begin, end in groups]
    column = np.empty_like(first)
    column[by_use] = place + room
    total = room + len(first)
    # zeros, not zeros_like: a large one comes from the system as zeros, and unused pages stay untouched
    hi = np.zeros((len(query_start) - 1, total), np.int32)
    lo = np.zeros(hi.shape, np.int32)
    places = request * total + column.repeat(count)
    hi.reshape(-1)[places] = pairs.hi.take(pair)
    blocks = np.zeros(total, np.int64)
    blocks[column] = key[first]
    if pairs.tile > 1:
        lo.reshape(-1)[places] = key % pairs.tile
        blocks //= pairs.tile
    if pairs.lo is not None:
        lo.reshape(-1)[places] = pairs.lo.take(pair)
    return SharedPlan(blocks, lo, hi, groups)


def _group(blocks: _Blocks, query_start: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[Group]]:
    """Places blocks so that blocks with the same users are adjacent.

    The blocks of a prefix are neighbours in the order of first use, so comparing neighbours, all at once, finds runs of
    blocks with equal users; only runs are processed one by one. There are separate runs with equal users if requests
    share crosswise.

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
    """Returns [blocks - 1] whether block i + 1 has other users than block i."""
    count = blocks.num_users
    lowest, highest = blocks.users[blocks.first], blocks.users[blocks.first + count - 1]
    differs = (count[1:] != count[:-1]) | (lowest[1:] != lowest[:-1])
    if np.array_equal(highest - lowest, count - 1):  # users without gaps: lowest and number are sufficient
        return differs
    begin = count.cumsum() - count
    index = np.arange(len(blocks.users))
    users = blocks.users.take(index + (blocks.first - begin).repeat(count))
    # if the previous block has another number of users, this compares unrelated entries, but then the result is unused
    before = users.take(index - count.repeat(count))
    return differs | np.logical_or.reduceat(users != before, begin)[1:]


def _runs(changes: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns starts and lengths of the runs of an array; entry i + 1 begins a new run if `changes[i]`."""
    bounds = np.empty(np.count_nonzero(changes) + 2, np.int64)
    bounds[0], bounds[-1] = 0, len(changes) + 1
    bounds[1:-1] = changes.nonzero()[0]
    bounds[1:-1] += 1
    return bounds[:-1], bounds[1:] - bounds[:-1]


def _rows(users: NDArray[np.int64], query_start: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns all rows of ascending requests."""
    last = users[-1]
    if query_start[last + 1] == last + 1:  # as many rows as requests up to here, so each has one
        return users
    if len(users) == 1:
        return np.arange(query_start[last], query_start[last + 1])
    start = query_start[users]
    count = query_start[users + 1] - start
    end = count.cumsum()
    return np.arange(end[-1]) + (start - (end - count)).repeat(count)


def common_prefix(context: NDArray[np.int64], block_tables: NDArray[np.int32], block_size: int) -> NDArray[np.int32]:
    """Returns the physical ids of the leading blocks that all requests see in full.

    Args:
        context: [requests] cached tokens that the rows of a request see, in any order; at least one request.
        block_tables: [requests, width] physical block ids.
    """
    if block_tables.item(0, 0) != block_tables.item(
        len(context) - 1, 0
    ):  # most batches without a common prefix end here
        return block_tables[0, :0]
    leading = block_tables[:, : int(context.min()) // block_size]
    same = (leading == leading[0]).all(axis=0)
    return leading[0, : len(same) if same.all() else int(same.argmin())]


def with_common_prefix(
    prefix: NDArray[np.int32], rest: SharedPlan | None, num_requests: int, num_rows: int, block_size: int
) -> SharedPlan | None:
    """Returns the plan of the other shared blocks with a first group of all rows; None if `rest` also has such a group.

    rest: a plan with room for the prefix, which is written into it: with many requests of many blocks, a copy would
        cost more than the rest of planning.
    """
    count = len(prefix)
    if rest is None:
        hi = np.zeros((num_requests, count), np.int32)
        rest = SharedPlan(np.zeros(count, np.int64), np.zeros(hi.shape, np.int32), hi, [])
    elif any(len(rows) == num_rows for rows, _, _ in rest.groups):
        return None
    rest.blocks[:count] = prefix
    rest.hi[:, :count] = block_size
    return rest._replace(groups=[(np.arange(num_rows), 0, count), *rest.groups])


class UniquePlan(NamedTuple):
    """Cached blocks that exactly one row uses; that row is always a single row.

    lo: below 0 only if distances count, see `Window`.
    num_tokens: tokens of all ranges, with a slot for each token: a range may have few of a block's. None: with blocks.
    """

    blocks: NDArray[np.int64]
    rows: NDArray[np.int64]
    lo: NDArray[np.int32]
    hi: NDArray[np.int32]
    num_tokens: int | None = None

    def pairs(self) -> int:
        return int((self.hi - np.maximum(self.lo, 0)).sum())


def plan_unique(pairs: ContextPairs, shared: SharedPairs) -> UniquePlan | None:
    """Returns the pairs that are not shared, in the order of the pairs."""
    if len(shared.pair) == len(pairs.key):
        return None
    if len(shared.pair):
        unique = np.ones(len(pairs.key), np.bool_)
        unique[shared.pair] = False
        pairs = pairs.take(unique.nonzero()[0])
    # a single row is the only row of its request and single rows come first: its row is its request's flat position
    blocks, lo = pairs.key.astype(np.int64), np.zeros(len(pairs.hi), np.int32)
    if pairs.tile > 1:
        lo[:] = blocks % pairs.tile
        blocks //= pairs.tile
    if pairs.lo is not None:
        lo = pairs.lo
    return UniquePlan(blocks, pairs.request, lo, pairs.hi)


CachedParts = tuple[SharedPlan | None, UniquePlan | None]


def divide_pairs(pairs: ContextPairs, num_single: int, query_start: NDArray[np.int64]) -> CachedParts:
    """Divides pairs into those that more than one row uses, and the others; see `shared_pairs` and `plan_shared`."""
    shared = shared_pairs(pairs, num_single)
    return plan_shared(pairs, shared, query_start), plan_unique(pairs, shared)


class CachedContexts(NamedTuple):
    """The input of the division; requests are in flat order.

    context: int64 [requests] cached tokens that the rows of a request see.
    requests: int64 [requests] row of `block_tables` of each request.
    block_tables: int32 [requests, width] physical block ids.
    query_start: int64 [requests + 1] first row of each request.
    num_single: requests [0, num_single) have one row, the others more.
    left_out: bool [requests, width] blocks of `block_tables` that are attended by choice (or not at all), if any.
    window: window of the rows, if it hides a token from one of them.
    """

    context: NDArray[np.int64]
    requests: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    query_start: NDArray[np.int64]
    num_single: int
    block_size: int
    left_out: NDArray[np.bool_] | None = None
    window: WindowPlan | None = None

    def plan(self) -> CachedParts:
        if self.window is not None:
            return self._plan_in_window(self.window)
        return self._plan_behind_prefix() or self._plan_all()

    def _plan_all(self) -> CachedParts:
        pairs = context_pairs(self.context, self.requests, self.block_tables, self.block_size, left_out=self.left_out)
        return divide_pairs(pairs, self.num_single, self.query_start)

    def _plan_in_window(self, window: WindowPlan) -> CachedParts:
        pairs = context_pairs(self.context, self.requests, self.block_tables, self.block_size, lowest=window.lowest)
        shared, unique = divide_pairs(pairs, self.num_single, self.query_start)
        if unique is not None and not window.by_distance:
            unique = unique._replace(lo=np.maximum(unique.lo, 0))
        return None if shared is None else shared._replace(rise=window.rise), unique

    def _plan_behind_prefix(self) -> CachedParts | None:
        """Plans the contexts after the blocks at the head of all contexts: all rows share these, so they are not
        searched.

        Returns None if there is no such block, or if all rows share further blocks, which belong to the same group.
        """
        if len(self.requests) < 2 or self.left_out is not None:
            return None
        prefix = common_prefix(self.context, self.block_tables, self.block_size)
        if not len(prefix):
            return None
        pairs = context_pairs(self.context, self.requests, self.block_tables, self.block_size, len(prefix))
        shared = shared_pairs(pairs, self.num_single)
        rest = plan_shared(pairs, shared, self.query_start, room=len(prefix))
        whole = with_common_prefix(prefix, rest, len(self.requests), int(self.query_start[-1]), self.block_size)
        return None if whole is None else (whole, plan_unique(pairs, shared))
