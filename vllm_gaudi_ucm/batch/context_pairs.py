"""Expands cached contexts into pairs of a request and a block."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.window import blocks_before


class ContextPairs(NamedTuple):
    """The blocks of the cached contexts, request by request in flat order, in the order of the context.

    request: int64 [pairs] position of the request in flat order.
    key: int [pairs] physical block id; if each token has its own slot, the first slot that is seen, in tiles of `tile`.
        The block id is `key // tile`. No request has a key twice.
    hi: int32 [pairs] the request sees tokens [key % tile, hi) of the block.
    lo: int32 [pairs], under a window: the request's first row sees the block's tokens from here on; below 0 if that
        token is in an earlier block. If None, all rows see all tokens before hi.
    """

    request: NDArray[np.int64]
    key: NDArray[np.integer]
    hi: NDArray[np.int32]
    tile: int = 1
    lo: NDArray[np.int32] | None = None

    def take(self, index: NDArray[np.int64]) -> ContextPairs:
        lo = None if self.lo is None else self.lo.take(index)
        return ContextPairs(self.request.take(index), self.key.take(index), self.hi.take(index), self.tile, lo)


def context_pairs(
    context: NDArray[np.int64],
    requests: NDArray[np.int64],
    block_tables: NDArray[np.int32],
    block_size: int,
    skip: int = 0,
    left_out: NDArray[np.bool_] | None = None,
    lowest: NDArray[np.int64] | None = None,
) -> ContextPairs:
    """Expands contexts into blocks. Does not read a block table beyond its request's context.

    Args:
        context: [requests] cached tokens that the rows of a request see, in flat order.
        requests: [requests] row of `block_tables` for each request in flat order.
        block_tables: [requests, width] physical block ids.
        skip: number of leading blocks to leave out; every context contains them in full.
        left_out: [requests, width] blocks to leave out, in the order of `block_tables`; not together with `skip`.
        lowest: [requests] first position that is seen, under a window; not together with either.
    """
    if left_out is not None:
        return _pairs_left(context, requests, block_tables, block_size, left_out)
    if lowest is not None:
        return _pairs_in_window(context, requests, block_tables, block_size, lowest)
    context = context - skip * block_size
    num_blocks = -(-context // block_size)
    end = num_blocks.cumsum()
    request = np.arange(len(context)).repeat(num_blocks)
    # gathering by flat index costs as many pairs as are in use; a mask would cost requests x width
    first = requests * block_tables.shape[1] + skip - (end - num_blocks)
    place = first.repeat(num_blocks) + np.arange(len(request))
    block = block_tables.take(place)
    hi = np.full(len(request), block_size, np.int32)
    last, tokens = end - 1, context - (num_blocks - 1) * block_size
    if np.count_nonzero(context) < len(context):  # a context without blocks has no last one
        last, tokens = last[context > 0], tokens[context > 0]
    hi[last] = tokens
    return ContextPairs(request, block, hi)


def _pairs_in_window(
    context: NDArray[np.int64],
    requests: NDArray[np.int64],
    block_tables: NDArray[np.int32],
    block_size: int,
    lowest: NDArray[np.int64],
) -> ContextPairs:
    """Expands contexts from the window on. Blocks before it are not read, because vLLM may have freed them."""
    skip = blocks_before(lowest, context, block_size)
    count = -(-context // block_size) - skip
    request = np.arange(len(context)).repeat(count)
    number = np.arange(len(request)) - (count.cumsum() - count - skip).repeat(count)
    start = number * block_size
    hi = np.minimum(context[request] - start, block_size).astype(np.int32)
    lo = (lowest[request] - start).astype(np.int32)
    return ContextPairs(request, block_tables[requests[request], number], hi, lo=lo)


def _pairs_left(
    context: NDArray[np.int64],
    requests: NDArray[np.int64],
    block_tables: NDArray[np.int32],
    block_size: int,
    left_out: NDArray[np.bool_],
) -> ContextPairs:
    """Expands contexts of which most blocks are left out: a mask then costs less than expanding all blocks."""
    width = block_tables.shape[1]
    num_blocks = -(-context // block_size)
    kept = np.arange(width, dtype=np.int32) < num_blocks.astype(np.int32)[:, None]
    kept &= ~left_out[requests]
    place = np.flatnonzero(kept)
    request = np.arange(len(context)).repeat(np.count_nonzero(kept, axis=1))
    number = place - request * width
    hi = np.full(len(request), block_size, np.int32)
    last = number == num_blocks[request] - 1
    hi[last] = (context - (num_blocks - 1) * block_size)[request[last]]
    return ContextPairs(request, block_tables[requests[request], number], hi)
