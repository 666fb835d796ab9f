"""The (request, cached block) pairs of a step, and which of their blocks more than one row uses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# A block id and the number of a pair share one 64-bit sorting key.
PAIR_BITS = 32
PAIR_MASK = (1 << PAIR_BITS) - 1


class ContextPairs(NamedTuple):
    """Every block of the cached contexts, request by request in flat order, in the order of the context.

    request: int64 [pairs] position of the request in flat order.
    block: int32 [pairs] physical block id.
    hi: int32 [pairs] the request sees tokens [0, hi) of the block.
    """

    request: NDArray[np.int64]
    block: NDArray[np.int32]
    hi: NDArray[np.int32]

    def take(self, index: NDArray[np.int64]) -> ContextPairs:
        return ContextPairs(self.request.take(index), self.block.take(index), self.hi.take(index))


class SharedPairs(NamedTuple):
    """Pairs whose block more than one row uses, ordered by block id, the pairs of a block in flat order.

    pair: int64 [shared] index into the pairs of the step. block: int64 [shared] physical block id.
    """

    pair: NDArray[np.int64]
    block: NDArray[np.int64]


def context_pairs(
    context: NDArray[np.int64],
    requests: NDArray[np.int64],
    block_tables: NDArray[np.int32],
    block_size: int,
    skip: int = 0,
    left_out: NDArray[np.bool_] | None = None,
) -> ContextPairs:
    """Expands contexts into blocks. Nothing is read of a block table beyond its request's context.

    Args:
        context: [requests] cached tokens that the rows of a request see, in flat order.
        requests: [requests] row of `block_tables` of each request in flat order.
        block_tables: [requests, width] physical block ids.
        block_size: tokens per cache block.
        skip: leading blocks to leave out; every context has them in full.
        left_out: [requests, width] blocks to leave out, in the order of `block_tables`.
    """
    context = context - skip * block_size
    num_blocks = -(-context // block_size)
    end = num_blocks.cumsum()
    request = np.arange(len(context)).repeat(num_blocks)
    # gathering by flat index costs the pairs in use, where a mask would cost requests x width
    first = requests * block_tables.shape[1] + skip - (end - num_blocks)
    place = first.repeat(num_blocks) + np.arange(len(request))
    block = block_tables.take(place)
    hi = np.full(len(request), block_size, np.int32)
    last, tokens = end - 1, context - (num_blocks - 1) * block_size
    if np.count_nonzero(context) < len(context):  # a context without a block has no last one
        last, tokens = last[context > 0], tokens[context > 0]
    hi[last] = tokens
    pairs = ContextPairs(request, block, hi)
    return pairs if left_out is None else pairs.take((~left_out.take(place)).nonzero()[0])


def shared_pairs(pairs: ContextPairs, num_single: int) -> SharedPairs:
    """Pairs whose block more than one row uses.

    One sort of 64-bit keys finds equal blocks and the order of their users at once. Its cost does not depend on how
    large block ids are, and a batch that shares nothing pays for nothing else.

    Args:
        pairs: all pairs of the step.
        num_single: requests [0, num_single) in flat order have one row; a block of another has several rows anyway.
    """
    key = pairs.block.astype(np.int64)
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
