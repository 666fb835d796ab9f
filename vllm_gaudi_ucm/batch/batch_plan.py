"""`plan_batch`: which (row, cached token) pairs a step computes, as a pure function of arrays.

No torch and no vLLM here, so that property tests can drive it with any batch. The three parts and their names come from
Intel's description of Unified Attention for vLLM on Gaudi; which of them sees what is stated at `plan_batch`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.selection_plan import SelectionInput, SelectionPlan, plan_selection
from vllm_gaudi_ucm.batch.sharing import (
    ContextPairs,
    SharedPairs,
    SharedPlan,
    common_prefix,
    context_pairs,
    plan_shared,
    shared_pairs,
    with_common_prefix,
)


class UniquePlan(NamedTuple):
    """Cached blocks that exactly one row uses; that row is always a single row."""

    blocks: NDArray[np.int64]
    rows: NDArray[np.int64]
    lo: NDArray[np.int32]
    hi: NDArray[np.int32]


def plan_unique(pairs: ContextPairs, shared: SharedPairs) -> UniquePlan | None:
    """The pairs that are not shared, in the order of the pairs."""
    if len(shared.pair) == len(pairs.block):
        return None
    if len(shared.pair):
        unique = np.ones(len(pairs.block), np.bool_)
        unique[shared.pair] = False
        pairs = pairs.take(unique.nonzero()[0])
    # a single row is the only row of its request and single rows come first: its row is its request's flat position
    return UniquePlan(pairs.block.astype(np.int64), pairs.request, np.zeros(len(pairs.hi), np.int32), pairs.hi)


CachedParts = tuple[SharedPlan | None, UniquePlan | None]


class CachedContexts(NamedTuple):
    """What decides the division; requests in flat order.

    context: int64 [requests] cached tokens that the rows of a request see.
    requests: int64 [requests] row of `block_tables` of each request.
    block_tables: int32 [requests, width] physical block ids.
    query_start: int64 [requests + 1] first row of each request.
    num_single: requests [0, num_single) have one row, the others more.
    block_size: tokens per cache block.
    left_out: bool [requests, width] blocks of `block_tables` that are attended by choice (or not at all), if any.
    """

    context: NDArray[np.int64]
    requests: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    query_start: NDArray[np.int64]
    num_single: int
    block_size: int
    left_out: NDArray[np.bool_] | None = None

    def plan(self) -> CachedParts:
        return self._plan_behind_prefix() or self._plan_all()

    def _plan_all(self) -> CachedParts:
        pairs = context_pairs(self.context, self.requests, self.block_tables, self.block_size, left_out=self.left_out)
        shared = shared_pairs(pairs, self.num_single)
        return plan_shared(pairs, shared, self.query_start), plan_unique(pairs, shared)

    def _plan_behind_prefix(self) -> CachedParts | None:
        """Blocks at the head of all contexts are shared by all rows: they take no part in the search for shared ones.

        None if there is no such block, or if all rows use others as well, which belong to the same group.
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


NO_TAILS: NDArray[np.int64] = np.zeros(0, np.int64)
"""Of a step in which no request has more rows that choose together than an ordinary graph holds."""


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

    def take(self, index: NDArray[np.int64]) -> BatchInput:
        """The entries of these requests."""
        return BatchInput(*(array[index] for array in self))


class CausalPlan(NamedTuple):
    """Row ranges of the requests with more than one new token, cut in slices `(query_lo, query_hi, key_lo, key_hi)`."""

    groups: NDArray[np.int32]
    slices: list[tuple[int, int, int, int]]


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
    selection: SelectionPlan | None = None

    @property
    def num_rows(self) -> int:
        return len(self.positions)


def plan_batch(
    batch: BatchInput, block_size: int, causal_slice: int = 512, selection: SelectionInput | None = None
) -> UnifiedPlan:
    """Classifies a step's rows and cached blocks.

    All new K/V are written to the cache before attention. A request with one new token sees its whole context, its own
    token included, in the cache. A request with more sees its computed tokens in the cache and its new tokens causally
    among themselves, so every (row, position) pair is counted exactly once. Whether a request is a prompt, a resumed
    request or a verification plays no role.

    Args:
        batch: one entry per scheduled request.
        block_size: tokens per cache block.
        causal_slice: query rows per causal slice.
        selection: what a sparse method chooses among; those blocks are neither shared nor unique.
    """
    many = batch.num_scheduled > 1
    num_single = len(many) - int(np.count_nonzero(many))
    # single rows first, otherwise the order given: a steady decode batch keeps its layout from step to step
    requests = many.argsort(kind="stable")
    new = batch.num_scheduled[requests].astype(np.int64)
    computed = batch.num_computed[requests].astype(np.int64)
    query_start = np.zeros(len(requests) + 1, np.int64)
    new.cumsum(out=query_start[1:])
    row_requests = np.arange(len(requests)).repeat(new)
    positions = np.arange(len(row_requests)) + (computed - query_start[:-1]).repeat(new)
    logical = positions // block_size
    slots = batch.block_tables[requests[row_requests], logical] * np.int64(block_size) + positions % block_size

    context = computed.copy()
    context[:num_single] += 1
    chosen = (
        None if selection is None else plan_selection(selection, requests, query_start, batch.block_tables, block_size)
    )
    left_out = None if selection is None else selection.left_out()
    cached = CachedContexts(context, requests, batch.block_tables, query_start, num_single, block_size, left_out)
    shared, unique = cached.plan()
    yields = computed + new >= batch.num_tokens[requests]
    return UnifiedPlan(
        requests=requests,
        query_start=query_start,
        row_requests=row_requests,
        positions=positions,
        slots=slots,
        num_single=num_single,
        causal=_plan_causal(num_single, row_requests, query_start, causal_slice),
        shared=shared,
        unique=unique,
        logits_requests=requests[yields],
        logits_rows=query_start[1:][yields] - 1,
        selection=chosen,
    )


def _plan_causal(
    num_single: int, row_requests: NDArray[np.int64], query_start: NDArray[np.int64], causal_slice: int
) -> CausalPlan | None:
    bounds = query_start[num_single:].tolist()
    if len(bounds) == 1:
        return None
    groups = row_requests.astype(np.int32)
    groups[:num_single] = -1
    slices = []
    for start, stop in pairwise(bounds):
        for lo in range(start, stop, causal_slice):
            hi = min(lo + causal_slice, stop)
            slices.append((lo, hi, start, hi))
    return CausalPlan(groups, slices)
