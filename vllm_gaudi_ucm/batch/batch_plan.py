"""A step, planned: which (row, cached token) pairs it computes, as a pure function of arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.selection_plan import SelectionInput, SelectionPlan, plan_selection
from vllm_gaudi_ucm.batch.sharing import CachedContexts, SharedPlan, UniquePlan, divide_pairs
from vllm_gaudi_ucm.batch.token_runs import run_pairs, run_slots

NO_REMAINDERS: NDArray[np.int64] = np.zeros(0, np.int64)
"""Of a step in which no request has more rows that choose together than an ordinary graph holds."""


class BatchInput(NamedTuple):
    """What the scheduler decided, one entry per scheduled request, in any order.

    num_computed, num_scheduled: tokens whose K/V are in the cache already; tokens to compute now (>= 1).
    num_tokens: tokens known of the request (prompt and outputs); a request yields logits once all of them are computed.
    block_tables: [requests, width] physical block ids; entries that the tokens above do not reach are undefined. With a
        slot for each token they are runs of slots, [requests, width, 3] of `TokenTable`.
    """

    num_computed: NDArray[np.int32]
    num_scheduled: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    block_tables: NDArray[np.int32]

    @property
    def has_token_tables(self) -> bool:
        """Whether each token has a slot of its own."""
        return self.block_tables.ndim == 3

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
    context = computed.copy()
    context[:num_single] += 1
    if batch.has_token_tables:
        slots = run_slots(computed, new, requests, batch.block_tables)
    else:
        blocks = batch.block_tables[requests[row_requests], positions // block_size]
        slots = blocks * np.int64(block_size) + positions % block_size
    chosen = (
        None if selection is None else plan_selection(selection, requests, query_start, batch.block_tables, block_size)
    )
    left_out = None if selection is None else selection.left_out()
    if batch.has_token_tables:
        pairs = run_pairs(context, requests, batch.block_tables, block_size)
        shared, unique = divide_pairs(pairs, num_single, query_start)
    else:
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


# Each appended block costs a few copies and a search; planning anew costs as much as about this many.
MAX_APPENDED = 8


class SteadyPlanner:
    """`plan_batch` with a memory of one step.

    A step is steady if every request has one new token, one token more computed than in the step before, and the same
    blocks but for appended ones. This is checked against the arrays, never assumed; any other step is planned anew.
    Successive plans share the arrays that did not change, so a plan is read-only.

    Args:
        block_size: tokens per cache block.
        causal_slice: query rows per causal slice.
    """

    def __init__(self, block_size: int, causal_slice: int = 512) -> None:
        self._block_size = block_size
        self._causal_slice = causal_slice
        self._decode: _SteadyDecode | None = None

    def plan(self, batch: BatchInput, selection: SelectionInput | None = None) -> UnifiedPlan:
        """What `plan_batch(batch, block_size, causal_slice, selection)` returns."""
        decode, self._decode = self._decode, None
        if selection is not None or batch.has_token_tables:
            # which blocks compete changes from step to step, and so do the runs of a token table
            return plan_batch(batch, self._block_size, self._causal_slice, selection)
        plan = None if decode is None else decode.advance(batch)
        if plan is None:
            plan = plan_batch(batch, self._block_size, self._causal_slice)
            only_decodes = 0 < plan.num_single == plan.num_rows == len(plan.logits_rows)
            decode = _SteadyDecode(plan, batch.block_tables.copy(), self._block_size) if only_decodes else None
        self._decode = decode
        return plan


class _SteadyDecode:
    """The plan of a step of single rows that all yield logits, to be moved by one token at a time.

    Once `advance` has returned None, the object is spent.

    Args:
        plan: the plan to begin with.
        block_tables: [requests, width] of its batch; written to later.
        block_size: tokens per cache block.
    """

    def __init__(self, plan: UnifiedPlan, block_tables: NDArray[np.int32], block_size: int) -> None:
        self._plan = plan
        self._block_tables = block_tables
        self._block_size = block_size
        self._tail_blocks: NDArray[np.int64] | None = None
        # steps until some request needs a block
        self._steps_in_blocks = block_size - 1 - int((plan.positions % block_size).max())

    def advance(self, batch: BatchInput) -> UnifiedPlan | None:
        """The plan of the next step, or None if `batch` is no continuation that can be planned here."""
        positions = self._plan.positions + 1
        if not self._continues(batch, positions):
            return None
        if self._tail_blocks is None:
            self._tail_blocks = self._find_tail_blocks()
        unique = self._plan.unique
        if self._tail_blocks is None or unique is None:
            return None
        slots = self._plan.slots + 1
        if self._steps_in_blocks:
            self._steps_in_blocks -= 1
        else:
            offsets = positions % self._block_size
            unique = self._append_blocks(unique, batch.block_tables, offsets, slots)
            self._steps_in_blocks = self._block_size - 1 - int(offsets.max())
        if unique is None or np.count_nonzero(batch.block_tables != self._block_tables):
            return None
        hi = unique.hi.copy()
        hi[self._tail_blocks] += 1
        self._plan = self._plan._replace(positions=positions, slots=slots, unique=UniquePlan(*unique[:3], hi))
        return self._plan

    def _continues(self, batch: BatchInput, positions: NDArray[np.int64]) -> bool:
        """Whether each request has one token at its next position, the last that is known of it."""
        return batch.block_tables.shape == self._block_tables.shape and not (
            np.count_nonzero(batch.num_computed != positions)
            or np.count_nonzero(batch.num_scheduled != 1)
            or np.count_nonzero(batch.num_tokens > positions + 1)
        )

    def _find_tail_blocks(self) -> NDArray[np.int64] | None:
        """[requests] entry of each request's last block in the unique part; None if some last block is shared."""
        unique = self._plan.unique
        if unique is None:
            return None
        last = np.bincount(unique.rows, minlength=self._plan.num_rows).cumsum() - 1
        is_last = unique.blocks[last] == self._plan.slots // self._block_size
        return last if is_last.all() else None

    def _append_blocks(
        self, unique: UniquePlan, block_tables: NDArray[np.int32], offsets: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> UniquePlan | None:
        """Adds an empty entry for each row at offset 0, whose block begins now, and corrects its slot.

        None if there are many, or if another request has one of these blocks, which would make it shared.
        """
        assert self._tail_blocks is not None
        begins = offsets == 0
        rows = begins.nonzero()[0]
        if len(rows) > MAX_APPENDED:
            return None
        columns = self._plan.positions[rows] // self._block_size + 1
        blocks = block_tables[rows, columns]
        for block in blocks.tolist():
            if np.count_nonzero(block_tables == block) > 1:
                return None
        self._block_tables[rows, columns] = blocks
        slots[rows] = blocks * np.int64(self._block_size)
        at = (self._tail_blocks[rows] + 1).tolist()
        self._tail_blocks = self._tail_blocks + begins.cumsum()
        return UniquePlan(
            blocks=_insert(unique.blocks, at, blocks),
            rows=_insert(unique.rows, at, rows),
            lo=np.zeros(len(unique.lo) + len(at), np.int32),
            hi=_insert(unique.hi, at, np.zeros(len(at), np.int32)),
        )


def _insert(array: NDArray, at: Sequence[int], values: NDArray) -> NDArray:
    """`values[i]` before entry `at[i]`, ascending; a quarter of the time of numpy's own for a few values."""
    pieces = []
    begin = 0
    for index, end in enumerate(at):
        pieces.append(array[begin:end])
        pieces.append(values[index : index + 1])
        begin = end
    pieces.append(array[begin:])
    return np.concatenate(pieces)


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
        """The blocks that become shared once a request of `rows` rows uses `blocks`, too."""
        return (blocks if rows > 1 else blocks & self.any) - self.shared


def _shared_blocks(batch: BatchInput, num_blocks: NDArray[np.int32]) -> int:
    """Distinct blocks that more than one row uses: all of a request with several rows, and those of two requests."""
    column = np.arange(batch.block_tables.shape[1])
    used = batch.block_tables[column < num_blocks[:, None]]
    several = np.repeat(batch.num_scheduled > 1, num_blocks)
    blocks, counts = np.unique(used, return_counts=True)
    return int(((counts > 1) | np.isin(blocks, used[several])).sum())
