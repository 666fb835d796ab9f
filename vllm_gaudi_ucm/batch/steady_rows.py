"""Plans a step by the previous one if its requests have the same rows: verifications of drafts, and sparse decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.block_table import has_same_blocks
from vllm_gaudi_ucm.batch.selection_plan import DENSE, SelectionInput, SelectionPlan, moved_selection

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan
    from vllm_gaudi_ucm.batch.sharing import SharedPlan, UniquePlan


class _Tails(NamedTuple):
    """The entries of the requests' last cached blocks, in flat order.

    unique: int64 [single rows] in the unique part. shared: int64 [other requests] columns of the shared part.
    """

    unique: NDArray[np.int64]
    shared: NDArray[np.int64]


class SteadyRows:
    """The plan of a step, moved by the tokens that each request has got in between, whatever their number.

    A step is steady if its requests have as many rows as in the previous step, the same blocks except for one that
    begins, and choose among the same blocks. This is checked against the arrays, never assumed. Only the last cached
    block of each request then differs: in the number of tokens that are seen, or because the next one has become the
    last. The object cannot be used any more once `advance` has returned None.

    Args:
        plan: the plan to begin with, of a step of blocks from which no window hides a token.
        batch: its step, with `selection`.
    """

    def __init__(self, plan: UnifiedPlan, batch: BatchInput, selection: SelectionInput | None, block_size: int) -> None:
        self._plan = plan
        self._selection = selection
        self._block_size = block_size
        self._num_scheduled = batch.num_scheduled.copy()
        self._tables = batch.block_tables.copy()
        self._num_blocks = self._count_blocks(self._context(batch))
        self._tails: _Tails | None = None

    def advance(self, batch: BatchInput, selection: SelectionInput | None) -> UnifiedPlan | None:
        """Returns the plan of the next step, or None if `batch` is not a continuation that can be planned here."""
        if not np.array_equal(batch.num_scheduled, self._num_scheduled):
            return None
        if not _is_same_choice(self._selection, selection):
            return None
        context = self._context(batch)
        num_blocks = self._count_blocks(context)
        begins = num_blocks - self._num_blocks
        if not self._keeps_blocks(batch.block_tables, begins):
            return None
        if self._tails is None:
            self._tails = self._find_tails()
        if self._tails is None:
            return None
        shared, unique = self._plan.shared, self._plan.unique
        if begins.any():
            requests, place = self._plan.requests, np.maximum(num_blocks - 1, 0)
            blocks = batch.block_tables[requests, place].astype(np.int64)
            if self._has_any(blocks[begins > 0]):
                return None
            shared, unique = self._begin_blocks(self._tails, blocks, begins > 0)
            self._num_blocks = num_blocks
        self._tables = batch.block_tables.copy()
        self._selection = selection
        self._plan = self._moved(batch, selection, context - (num_blocks - 1) * self._block_size, shared, unique)
        return self._plan

    def _context(self, batch: BatchInput) -> NDArray[np.int64]:
        """Returns [requests] the cached tokens that the rows of each request see, in flat order."""
        context = batch.num_computed[self._plan.requests].astype(np.int64)
        context[: self._plan.num_single] += 1
        return context

    def _count_blocks(self, context: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-context // self._block_size)

    def _keeps_blocks(self, tables: NDArray[np.int32], begins: NDArray[np.int64]) -> bool:
        """Returns whether each request has the same cached blocks, and at most one more. begins: [requests] how many
        more, in flat order.
        """
        if len(begins) == 0 or begins.min() < 0 or begins.max() > 1 or not self._num_blocks.all():
            return False
        known = np.empty(len(begins), np.int64)
        known[self._plan.requests] = self._num_blocks
        return has_same_blocks(self._tables, tables, known)

    def _find_tails(self) -> _Tails | None:
        """Returns None if a last block is shared by requests, or chosen."""
        plan, single = self._plan, self._plan.num_single
        tails = self._tables[plan.requests, self._num_blocks - 1].astype(np.int64)
        unique = shared = np.zeros(0, np.int64)
        if single:
            if plan.unique is None:
                return None
            unique = np.bincount(plan.unique.rows, minlength=single).cumsum() - 1
            own = np.array_equal(plan.unique.rows[unique], np.arange(single))
            if not (own and np.array_equal(plan.unique.blocks[unique], tails[:single])):
                return None
        if single < len(tails):
            if plan.shared is None:
                return None
            shared = np.full(len(tails) - single, -1)
            for rows, _, end in plan.shared.groups:
                request = int(plan.row_requests[rows[0]])
                if request >= single and request == plan.row_requests[rows[-1]]:
                    shared[request - single] = end - 1
            if shared.min() < 0 or not np.array_equal(plan.shared.blocks[shared], tails[single:]):
                return None
        return _Tails(unique, shared)

    def _has_any(self, blocks: NDArray[np.int64]) -> bool:
        """Returns whether some of these blocks are among the cached ones, or the same."""
        parts = (self._plan.shared, self._plan.unique)
        known = [part.blocks for part in parts if part is not None]
        return len(np.unique(blocks)) < len(blocks) or bool(np.isin(blocks, np.concatenate(known)).any())

    def _begin_blocks(
        self, tails: _Tails, blocks: NDArray[np.int64], begins: NDArray[np.bool_]
    ) -> tuple[SharedPlan | None, UniquePlan | None]:
        """Makes the next blocks of some requests their last ones. blocks, begins: [requests], in flat order."""
        single, size = self._plan.num_single, self._block_size
        shared, unique = self._plan.shared, self._plan.unique
        places_unique, places_shared = tails
        of_single, of_others = begins[:single].nonzero()[0], begins[single:].nonzero()[0]
        if unique is not None and len(of_single):
            at = places_unique[of_single] + 1
            full = unique.hi.copy()
            full[at - 1] = size
            unique = unique._replace(
                blocks=np.insert(unique.blocks, at, blocks[of_single]),
                rows=np.insert(unique.rows, at, of_single),
                lo=np.insert(unique.lo, at, 0),
                hi=np.insert(full, at, 0),
            )
            places_unique = places_unique + begins[:single].cumsum()
        if shared is not None and len(of_others):
            old = places_shared[of_others]
            order = old.argsort()
            at = old[order] + 1
            full = shared.hi.copy()
            full[single + of_others, old] = size
            shared = shared._replace(
                blocks=np.insert(shared.blocks, at, blocks[single + of_others[order]]),
                lo=np.insert(shared.lo, at, 0, axis=1),
                hi=np.insert(full, at, 0, axis=1),
                # a block goes to the end of its request's group, which `at` is behind
                groups=[
                    (rows, begin + int(np.count_nonzero(at <= begin)), end + int(np.count_nonzero(at <= end)))
                    for rows, begin, end in shared.groups
                ],
            )
            places_shared = places_shared + np.searchsorted(at, places_shared, side="right") + begins[single:]
        self._tails = _Tails(places_unique, places_shared)
        return shared, unique

    def _moved(
        self,
        batch: BatchInput,
        selection: SelectionInput | None,
        seen: NDArray[np.int64],
        shared: SharedPlan | None,
        unique: UniquePlan | None,
    ) -> UnifiedPlan:
        """Returns the plan with other positions. seen: [requests] tokens of their last blocks, in flat order."""
        plan, size, tails = self._plan, self._block_size, self._tails
        assert tails is not None, "found before"
        requests, single = plan.requests, plan.num_single
        computed = batch.num_computed[requests].astype(np.int64)
        new = np.diff(plan.query_start)
        positions = np.arange(plan.num_rows) + (computed - plan.query_start[:-1]).repeat(new)
        slots = batch.block_tables[requests[plan.row_requests], positions // size] * np.int64(size) + positions % size
        if unique is not None and single:
            hi = unique.hi.copy()
            hi[tails.unique] = seen[:single]
            unique = unique._replace(hi=hi)
        if shared is not None and single < len(requests):
            hi = shared.hi.copy()
            hi[np.arange(single, len(requests)), tails.shared] = seen[single:]
            shared = shared._replace(hi=hi)
        yields = computed + new >= batch.num_tokens[requests]
        group = plan.first._replace(
            slots=slots, shared=shared, unique=unique, selection=_moved_choice(plan.selection, selection, requests)
        )
        return plan._replace(
            table_rows=requests if batch.table_rows is None else batch.table_rows[requests],
            positions=positions,
            logits_requests=requests[yields],
            logits_rows=plan.query_start[1:][yields] - 1,
            groups=(group,),
        )


def _is_same_choice(old: SelectionInput | None, new: SelectionInput | None) -> bool:
    """Returns whether the same requests choose as many of the same blocks, in whichever mode."""
    if old is None or new is None:
        return old is new
    if not (old.absent is new.absent is old.tile_rows is new.tile_rows is None):
        return False
    if (old.width, old.most, old.row_step) != (new.width, new.most, new.row_step):
        return False
    if old.candidates is not new.candidates:
        width = min(old.candidates.shape[1], new.candidates.shape[1])
        if (old.candidates[:, :width] != new.candidates[:, :width]).any():
            return False
        if old.candidates[:, width:].any() or new.candidates[:, width:].any():
            return False
    return (
        np.array_equal(old.counts, new.counts)
        and np.array_equal(old.slots, new.slots)
        and np.array_equal(old.modes == DENSE, new.modes == DENSE)
    )


def _moved_choice(
    plan: SelectionPlan | None, selection: SelectionInput | None, requests: NDArray[np.int64]
) -> SelectionPlan | None:
    return None if plan is None or selection is None else moved_selection(plan, selection, requests)
