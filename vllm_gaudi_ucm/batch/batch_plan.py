"""Plans a step: which (row, cached token) pairs it computes, as a pure function of arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.causal_plan import CausalPlan, plan_causal
from vllm_gaudi_ucm.batch.selection_plan import SelectionInput, SelectionPlan, plan_selection
from vllm_gaudi_ucm.batch.sharing import CachedContexts, SharedPlan, UniquePlan, divide_pairs
from vllm_gaudi_ucm.batch.token_runs import run_pairs, run_slots
from vllm_gaudi_ucm.batch.window import Window, WindowPlan

NO_REMAINDERS: NDArray[np.int64] = np.zeros(0, np.int64)
"""The remainders of a step in which every request's rows that choose together fit an ordinary graph."""


class BatchInput(NamedTuple):
    """The scheduler's decisions, one entry per scheduled request, in any order.

    num_computed, num_scheduled: tokens whose K/V are already in the cache; tokens to compute now (>= 1).
    num_tokens: known tokens of the request (prompt and outputs); a request yields logits once all of them are computed.
    tables: for each KV-cache group, [requests, width] physical block ids; entries beyond the tokens above are
        undefined. If each token has its own slot, they are runs of slots, [requests, width, 3] of `TokenTable`.
    table_rows: int64 [requests] rows of the request table; if None, request i has row i.
    """

    num_computed: NDArray[np.int32]
    num_scheduled: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    tables: tuple[NDArray[np.int32], ...]
    table_rows: NDArray[np.int64] | None = None

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """Returns the table of the first group; the sizes of buckets count its blocks."""
        return self.tables[0]

    @property
    def has_token_tables(self) -> bool:
        """Returns whether each token has its own slot."""
        return self.block_tables.ndim == 3

    def take(self, index: NDArray[np.int64]) -> BatchInput:
        """Returns the entries of these requests."""
        computed, scheduled, tokens = self.num_computed[index], self.num_scheduled[index], self.num_tokens[index]
        rows = index if self.table_rows is None else self.table_rows[index]
        return BatchInput(computed, scheduled, tokens, tuple(table[index] for table in self.tables), rows)

    def of_group(self, number: int) -> BatchInput:
        """Returns the same step with the table of only one group."""
        return self._replace(tables=(self.tables[number],))


class GroupPlan(NamedTuple):
    """The reads and writes of a step's rows in one KV-cache group.

    slots: int64 [rows] in the cache (block id * block size + offset).
    causal, shared, unique: the parts of attention; None if no row has this part.
    selection: the blocks from which a sparse method chooses.
    """

    slots: NDArray[np.int64]
    causal: CausalPlan | None
    shared: SharedPlan | None
    unique: UniquePlan | None
    selection: SelectionPlan | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Returns the names of the parts of attention that the step has."""
        found = (("shared", self.shared), ("unique", self.unique), ("causal", self.causal))
        return tuple(name for name, part in found if part is not None)


class PlanOfGroup(Protocol):
    """The plan of a step for one kind of KV-cache group: `GroupPlan` for attention."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Returns the parts that the step has in this group, by which its tensors are chosen; see `StepTensor`."""
        ...


class UnifiedPlan(NamedTuple):
    """The plan of a step. Rows are query tokens in the flat batch; single rows (one new token) come first.

    requests: [requests] indices into the BatchInput, in flat order.
    query_start: [requests + 1] first row of each request in flat order.
    table_rows: [requests] row of the request table for each request in flat order.
    row_requests: [rows] position in `requests` of the request that a row belongs to.
    positions: [rows] position in the sequence.
    num_single: rows [0, num_single) are the single rows.
    logits_requests, logits_rows: requests (indices into the BatchInput) that yield a token, and their rows.
    groups: the same rows in each KV-cache group, at least one. The first one is an attention group: the sizes of
        buckets, sparse methods and the record of a step refer to it, and its parts have properties here.
    """

    requests: NDArray[np.int64]
    query_start: NDArray[np.int64]
    table_rows: NDArray[np.int64]
    row_requests: NDArray[np.int64]
    positions: NDArray[np.int64]
    num_single: int
    logits_requests: NDArray[np.int64]
    logits_rows: NDArray[np.int64]
    groups: tuple[PlanOfGroup, ...]

    @property
    def first(self) -> GroupPlan:
        return cast(GroupPlan, self.groups[0])

    @property
    def slots(self) -> NDArray[np.int64]:
        return self.first.slots

    @property
    def causal(self) -> CausalPlan | None:
        return self.first.causal

    @property
    def shared(self) -> SharedPlan | None:
        return self.first.shared

    @property
    def unique(self) -> UniquePlan | None:
        return self.first.unique

    @property
    def selection(self) -> SelectionPlan | None:
        return self.first.selection

    @property
    def num_rows(self) -> int:
        return len(self.positions)


def plan_batch(
    batch: BatchInput,
    block_size: int,
    causal_slice: int = 512,
    selection: SelectionInput | None = None,
    window: Window | None = None,
) -> UnifiedPlan:
    """Classifies a step's rows and cached blocks.

    All new K/V are written to the cache before attention. A request with one new token sees its whole context,
    including its own token, in the cache. A request with more sees its computed tokens in the cache and its new tokens
    causally among themselves, so every (row, position) pair is counted exactly once. It does not matter whether a
    request is a prompt, a resumed request or a verification.

    Args:
        batch: one entry per scheduled request.
        selection: the blocks from which a sparse method chooses; they are neither shared nor unique.
        window: how far back the rows see; cannot be combined with a selection or with a slot for each token. Blocks
            that no row sees are not read from the tables. A step from which the window hides nothing is planned as if
            there were none.
    """
    many = batch.num_scheduled > 1
    num_single = len(many) - int(np.count_nonzero(many))
    # single rows first, otherwise in the given order: a steady decode batch keeps its layout from step to step
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
    within = None
    if window is not None and window.hides_from(positions):
        if selection is not None or batch.has_token_tables:
            raise ValueError("plan_batch: found a window with a selection or token tables, expected blocks alone")
        within = WindowPlan.from_rows(window, computed, positions, row_requests, query_start)
    if batch.has_token_tables:
        pairs = run_pairs(context, requests, batch.block_tables, block_size)
        shared, unique = divide_pairs(pairs, num_single, query_start)
        unique = None if unique is None else unique._replace(num_tokens=unique.pairs())
    else:
        cached = CachedContexts(context, requests, batch.block_tables, query_start, num_single, block_size)
        shared, unique = cached._replace(left_out=left_out, window=within).plan()
    causal = plan_causal(num_single, row_requests, query_start, causal_slice, within)
    yields = computed + new >= batch.num_tokens[requests]
    return UnifiedPlan(
        requests=requests,
        query_start=query_start,
        table_rows=requests if batch.table_rows is None else batch.table_rows[requests],
        row_requests=row_requests,
        positions=positions,
        num_single=num_single,
        logits_requests=requests[yields],
        logits_rows=query_start[1:][yields] - 1,
        groups=(GroupPlan(slots, causal, shared, unique, chosen),),
    )


# Each appended block costs a few copies and a search; a new plan costs about as much as this many.
MAX_APPENDED = 8

# Ranges of shared blocks (requests x blocks) up to which copying them costs less than planning anew: 1 MB.
MOST_MOVED = 1 << 18


class MovablePlan(Protocol):
    """The plan of a step, from which the plan of the next one is made."""

    def advance(self, batch: BatchInput, selection: SelectionInput | None) -> UnifiedPlan | None:
        """Returns the plan of the next step, or None if it is not a continuation; this is then the last call."""
        ...


MakeMovable = Callable[[UnifiedPlan, BatchInput, SelectionInput | None, int], MovablePlan]
"""Makes it from a plan, its step and selection, and the block size: `SteadyRows`."""


class SteadyPlanner:
    """Calls `plan_batch`, and remembers the last step of each batch in flight.

    A step is steady if every request has as many rows as in the previous step, and the same blocks except for appended
    ones: `_SteadyDecode` moves dense decodes by one token, `rows` any other step by any number of tokens. This is
    checked against the arrays, never assumed; any other step is planned anew. Successive plans share the unchanged
    arrays, so a plan is read-only.

    Args:
        batches: batches in flight, which have different requests and take turns.
        window: how far back the rows see.
        rows: makes plans that move by any number of tokens; None: only decodes are moved.
    """

    def __init__(
        self,
        block_size: int,
        causal_slice: int = 512,
        batches: int = 1,
        window: Window | None = None,
        rows: MakeMovable | None = None,
    ) -> None:
        self._block_size = block_size
        self._causal_slice = causal_slice
        self._window = window
        self._make_rows = rows
        self._last: deque[MovablePlan | None] = deque([None] * batches)

    def plan(self, batch: BatchInput, selection: SelectionInput | None = None) -> UnifiedPlan:
        """Returns the same as `plan_batch(batch, block_size, causal_slice, selection, window)`."""
        last = self._last.popleft()
        self._last.append(None)
        window = self._window
        hides = window is not None and window.hides_from(batch.num_computed + batch.num_scheduled - np.int64(1))
        if batch.has_token_tables or hides:
            # the runs of a token table and the first tokens of windows change from step to step
            return plan_batch(batch, self._block_size, self._causal_slice, selection, window)
        plan = None if last is None else last.advance(batch, selection)
        if plan is None:
            moved = self._move(last, batch, selection) if isinstance(last, _SteadyDecode) else None
            plan = moved or plan_batch(batch, self._block_size, self._causal_slice, selection)
            last = self._follow(plan, batch, selection)
        self._last[-1] = last
        return plan

    def _move(self, last: _SteadyDecode, batch: BatchInput, selection: SelectionInput | None) -> UnifiedPlan | None:
        """Moves decodes by another number of tokens: passes of a draft model go on so in the next step."""
        if self._make_rows is None:
            return None
        return self._make_rows(last.plan, last.batch(), None, self._block_size).advance(batch, selection)

    def _follow(self, plan: UnifiedPlan, batch: BatchInput, selection: SelectionInput | None) -> MovablePlan | None:
        if selection is None and 0 < plan.num_single == plan.num_rows == len(plan.logits_rows):
            return _SteadyDecode(plan, batch.block_tables.copy(), self._block_size)
        if self._make_rows is None or (plan.shared is not None and plan.shared.hi.size > MOST_MOVED):
            return None
        return self._make_rows(plan, batch, selection, self._block_size)


class _SteadyDecode:
    """The plan of a step of single rows that all yield logits, advanced by one token at a time.

    Once `advance` has returned None, only `plan` and `batch` can be used.

    Args:
        plan: the plan to begin with.
        block_tables: [requests, width] of its batch; this object writes to it later.
    """

    def __init__(self, plan: UnifiedPlan, block_tables: NDArray[np.int32], block_size: int) -> None:
        self._plan = plan
        self._block_tables = block_tables
        self._block_size = block_size
        self._tail_blocks: NDArray[np.int64] | None = None
        # steps until some request needs a new block
        self._steps_in_blocks = block_size - 1 - int((plan.positions % block_size).max())

    def advance(self, batch: BatchInput, selection: SelectionInput | None) -> UnifiedPlan | None:
        """Returns the plan of the next step, or None if `batch` is not a continuation that can be planned here."""
        positions = self._plan.positions + 1
        if selection is not None or not self._continues(batch, positions):
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
        rows = self._plan.requests if batch.table_rows is None else batch.table_rows
        moved = GroupPlan(slots, None, self._plan.shared, unique._replace(hi=hi))
        self._plan = self._plan._replace(table_rows=rows, positions=positions, groups=(moved,))
        return self._plan

    @property
    def plan(self) -> UnifiedPlan:
        return self._plan

    def batch(self) -> BatchInput:
        """Returns the step of the last plan."""
        computed = self._plan.positions.astype(np.int32)
        return BatchInput(computed, np.ones_like(computed), computed + 1, (self._block_tables,))

    def _continues(self, batch: BatchInput, positions: NDArray[np.int64]) -> bool:
        """Returns whether each request has one token at its next position, which is its last known token."""
        return batch.block_tables.shape == self._block_tables.shape and not (
            np.count_nonzero(batch.num_computed != positions)
            or np.count_nonzero(batch.num_scheduled != 1)
            or np.count_nonzero(batch.num_tokens > positions + 1)
        )

    def _find_tail_blocks(self) -> NDArray[np.int64] | None:
        """Returns [requests] the entry of each request's last block in the unique part; None if one is shared."""
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

        Returns None if there are many such rows, or if another request has one of the blocks, which would make it
        shared.
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
    """Inserts `values[i]` before entry `at[i]`, ascending; a few values take a quarter of the time of np.insert."""
    pieces = []
    begin = 0
    for index, end in enumerate(at):
        pieces.append(array[begin:end])
        pieces.append(values[index : index + 1])
        begin = end
    pieces.append(array[begin:])
    return np.concatenate(pieces)
