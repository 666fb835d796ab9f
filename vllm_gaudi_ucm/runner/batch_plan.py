"""`plan_batch`: which (row, cached token) pairs a step computes, as a pure function of arrays.

No torch and no vLLM here, so that property tests can drive it with any batch. The three parts and their names come from
Intel's description of Unified Attention for vLLM on Gaudi; which of them sees what is stated at `plan_batch`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32] | NDArray[np.int64]


class BatchInput(NamedTuple):
    """What the scheduler decided, one entry per scheduled request, in any order.

    num_computed, num_scheduled: tokens whose K/V are in the cache already; tokens to compute now (>= 1).
    num_tokens: tokens known of the request (prompt and outputs); a request yields logits once all of them are computed.
    block_tables: [requests, width] physical block ids; entries that the tokens above do not reach are undefined.
    """

    num_computed: NDArray[np.int32]
    num_scheduled: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    block_tables: NDArray[np.int32]


class CausalPlan(NamedTuple):
    """Row ranges of the requests with more than one new token, cut in slices `(query_lo, query_hi, key_lo, key_hi)`."""

    groups: NDArray[np.int32]
    slices: list[tuple[int, int, int, int]]


class SharedPlan(NamedTuple):
    """Cached blocks that more than one row uses: token ranges by (request, block), and sets of rows with equal blocks.

    groups: `(rows, block_lo, block_hi)`: exactly the rows that use `blocks[block_lo:block_hi]`.
    """

    blocks: NDArray[np.int64]
    lo: NDArray[np.int32]
    hi: NDArray[np.int32]
    groups: list[tuple[NDArray[np.int64], int, int]]


class UniquePlan(NamedTuple):
    """Cached blocks that exactly one row uses; that row is always a single row."""

    blocks: NDArray[np.int64]
    rows: NDArray[np.int64]
    lo: NDArray[np.int32]
    hi: NDArray[np.int32]


class UnifiedPlan(NamedTuple):
    """A step, decided. Rows are query tokens in the flat batch; single rows (one new token) come first.

    requests: [requests] indices into the BatchInput, in flat order.
    query_start: [requests + 1] first row of each request in flat order.
    row_requests: [rows] position in `requests` of the request a row belongs to.
    positions, slots: [rows] position in the sequence; slot in the cache (block id * block size + offset).
    num_single: rows [0, num_single) are the single rows.
    logits_requests, logits_rows: requests (indices into the BatchInput) that yield a token, and their rows.
    """

    requests: NDArray[np.int64]
    query_start: NDArray[np.int64]
    row_requests: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    num_single: int
    causal: CausalPlan | None
    shared: SharedPlan | None
    unique: UniquePlan | None
    logits_requests: NDArray[np.int64]
    logits_rows: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return len(self.positions)


class _Pairs(NamedTuple):
    """Every (request in flat order, logical block) of the cached contexts, row-major."""

    request: NDArray[np.int64]
    logical: NDArray[np.int64]
    block: NDArray[np.int64]
    hi: NDArray[np.int32]

    def where(self, mask: NDArray[np.bool_]) -> _Pairs:
        return _Pairs(self.request[mask], self.logical[mask], self.block[mask], self.hi[mask])


def plan_batch(batch: BatchInput, block_size: int, causal_slice: int = 512) -> UnifiedPlan:
    """Classifies a step's rows and cached blocks.

    All new K/V are written to the cache before attention. A request with one new token sees its whole context, its own
    token included, in the cache. A request with more sees its computed tokens in the cache and its new tokens causally
    among themselves, so every (row, position) pair is counted exactly once. Whether a request is a prompt, a resumed
    request or a verification plays no role.

    Args:
        batch: one entry per scheduled request.
        block_size: tokens per cache block.
        causal_slice: query rows per causal slice.
    """
    # single rows first, otherwise the order given: a steady decode batch keeps its layout from step to step
    requests = np.argsort(batch.num_scheduled > 1, kind="stable")
    new = batch.num_scheduled[requests].astype(np.int64)
    computed = batch.num_computed[requests].astype(np.int64)
    tables = batch.block_tables[requests]

    query_start = np.zeros(len(requests) + 1, np.int64)
    np.cumsum(new, out=query_start[1:])
    row_requests = np.repeat(np.arange(len(requests)), new)
    positions = np.arange(query_start[-1]) - query_start[row_requests] + computed[row_requests]
    slots = tables[row_requests, positions // block_size].astype(np.int64) * block_size + positions % block_size

    single = new == 1
    pairs = _context_pairs(np.where(single, computed + 1, computed), tables, block_size)
    multi_user = ~single[pairs.request]
    if pairs.block.size:
        multi_user |= np.bincount(pairs.block)[pairs.block] > 1
    yields = computed + new >= batch.num_tokens[requests]
    return UnifiedPlan(
        requests=requests,
        query_start=query_start,
        row_requests=row_requests,
        positions=positions,
        slots=slots,
        num_single=int(single.sum()),
        causal=_plan_causal(new, query_start, causal_slice),
        shared=_plan_shared(pairs.where(multi_user), query_start),
        unique=_plan_unique(pairs.where(~multi_user)),
        logits_requests=requests[yields],
        logits_rows=query_start[1:][yields] - 1,
    )


def _context_pairs(context: NDArray[np.int64], tables: NDArray[np.int32], block_size: int) -> _Pairs:
    """Expands each request's cached context of `context` tokens into its blocks with token ranges [0, hi)."""
    num_blocks = -(-context // block_size)
    request = np.repeat(np.arange(len(context)), num_blocks)
    first = np.cumsum(num_blocks) - num_blocks
    logical = np.arange(len(request)) - first[request]
    hi = np.minimum(context[request] - logical * block_size, block_size).astype(np.int32)
    return _Pairs(request, logical, tables[request, logical].astype(np.int64), hi)


def _plan_causal(new: NDArray[np.int64], query_start: NDArray[np.int64], causal_slice: int) -> CausalPlan | None:
    multi = np.flatnonzero(new > 1)
    if not multi.size:
        return None
    groups = np.repeat(np.where(new > 1, np.arange(len(new)), -1), new).astype(np.int32)
    slices = []
    for start, stop in zip(query_start[multi].tolist(), query_start[multi + 1].tolist(), strict=True):
        for lo in range(start, stop, causal_slice):
            hi = min(lo + causal_slice, stop)
            slices.append((lo, hi, start, hi))
    return CausalPlan(groups, slices)


def _plan_shared(pairs: _Pairs, query_start: NDArray[np.int64]) -> SharedPlan | None:
    if not pairs.block.size:
        return None
    ids, column = np.unique(pairs.block, return_inverse=True)
    hi = np.zeros((len(query_start) - 1, len(ids)), np.int32)
    hi[pairs.request, column] = pairs.hi
    order, first = _group_by_users(hi > 0)
    hi = hi[:, order]
    groups = []
    for lo_block, hi_block in zip(first, [*first[1:], len(ids)], strict=True):
        users = np.flatnonzero(hi[:, lo_block])
        rows = np.concatenate([np.arange(query_start[user], query_start[user + 1]) for user in users])
        groups.append((rows, lo_block, hi_block))
    return SharedPlan(ids[order].astype(np.int64), np.zeros_like(hi), hi, groups)


def _group_by_users(uses: NDArray[np.bool_]) -> tuple[NDArray[np.int64], list[int]]:
    """Orders blocks so that those with the same set of users stand together.

    Multiplying every row with every shared block would cost rows x blocks where the batch is block-sparse (several
    prompts with a context of their own each); with groups the cost follows the pairs in use.

    Args:
        uses: [requests, blocks].

    Returns:
        The order of the blocks, and the first block of each group in that order.
    """
    bits = np.ascontiguousarray(np.packbits(uses, axis=0).T)
    users = bits.view(np.dtype((np.void, bits.shape[1]))).ravel()
    _, group = np.unique(users, return_inverse=True)
    order = np.argsort(group, kind="stable")
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    return order, first.tolist()


def _plan_unique(pairs: _Pairs) -> UniquePlan | None:
    if not pairs.block.size:
        return None
    # a single row is the only row of its request and single rows come first: its row is its request's flat position
    return UniquePlan(pairs.block, pairs.request, np.zeros_like(pairs.hi), pairs.hi)
