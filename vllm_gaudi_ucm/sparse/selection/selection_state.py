"""The host's side of block selection: from the scheduler's decisions to what a step's plan chooses among."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.selection_plan import DENSE, SelectionInput
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.observability.selection_totals import SelectionTotals
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode
from vllm_gaudi_ucm.sparse.selection.choice_slots import ChoiceSlots
from vllm_gaudi_ucm.sparse.selection.summary_queue import SummaryQueue

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import BatchInput
    from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection
    from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits


class StepSelection(NamedTuple):
    """What a step's plan chooses among (None: every request is dense), and the blocks to summarise in it.

    summary_blocks: int64 [n] physical block ids.
    """

    input: SelectionInput | None
    summary_blocks: NDArray[np.int64]


DENSE_STEP = StepSelection(None, np.zeros(0, np.int64))


class SelectionState:
    """Follows every block that is written and every choice that is stored.

    Args:
        num_blocks: of the KV cache.
        limits: sizes of choices.
        bounded: whether a step has room for `limits.summaries` only; at true shapes it has as many as it needs.
        some_away: whether block tables have the dummy block where a block is not on the device.
    """

    def __init__(self, num_blocks: int, limits: SelectionLimits, bounded: bool, some_away: bool = False) -> None:
        self.summaries = SummaryQueue(num_blocks)
        self.slots = ChoiceSlots(limits.max_num_seqs, limits.width)
        self.totals = SelectionTotals()
        # requests that chose since `begin_step`: their slot, and their full blocks
        self.chosen: dict[str, tuple[int, int]] = {}
        self._limits = limits
        self._bounded = bounded
        self._some_away = some_away

    def begin_step(self) -> None:
        """Before the step, or its first division."""
        self.chosen.clear()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that have ended, begin, or were preempted: nothing stored is theirs."""
        self.slots.forget(request_ids)

    def step(
        self,
        request_ids: Sequence[str],
        batch: BatchInput,
        num_drafts: NDArray[np.int64],
        decisions: Mapping[str, RequestSelection],
    ) -> StepSelection:
        """Once per step (or division of one), before it is planned.

        Args:
            request_ids: of the scheduled requests, in the order of `batch`.
            batch: their tokens and blocks.
            num_drafts: [requests] how many of a request's new tokens may turn out wrong.
            decisions: what the scheduler says of sparse requests.
        """
        absent = self._absent(batch) if self._some_away else None
        is_full = self._follow(batch, num_drafts, absent)
        rows = int(batch.num_scheduled.sum())
        summary_blocks = self.summaries.take(self._limits.summaries(rows) if self._bounded else None)
        sparse = [index for index, request_id in enumerate(request_ids) if request_id in decisions]
        if not sparse and absent is None:
            return StepSelection(None, summary_blocks)
        selection = _all_dense(batch, absent)._replace(num_drafts=num_drafts)
        # entries of a table beyond the request's tokens are undefined: only those of full blocks are read
        open_blocks = is_full.copy()
        open_blocks[is_full] = self.summaries.ready[batch.block_tables[is_full]]
        room = self._limits.max_selected_blocks
        num_full = (batch.num_computed + batch.num_scheduled - num_drafts) // self._limits.block_size
        context_blocks = -(-(batch.num_computed + batch.num_scheduled) // self._limits.block_size)
        for index in sparse:
            decision = decisions[request_ids[index]]
            slot = self.slots.slot(request_ids[index], request_ids)
            chosen = self._decide(selection, index, slot, decision, open_blocks[index], room)
            if chosen:
                self.chosen[request_ids[index]] = slot, int(num_full[index])
                mode, candidates = SelectionMode(int(selection.modes[index])), int(selection.candidates[index].sum())
                self.totals.add(mode, int(context_blocks[index]), candidates, chosen)
            room -= chosen
        if absent is None and (selection.modes == DENSE).all():
            return StepSelection(None, summary_blocks)
        return StepSelection(selection, summary_blocks)

    def _absent(self, batch: BatchInput) -> NDArray[np.bool_] | None:
        """[requests, width] blocks of the contexts that are not on the device; None where all are."""
        end = (batch.num_computed + batch.num_scheduled) // self._limits.block_size
        is_context = np.arange(batch.block_tables.shape[1]) < end[:, None]
        absent = is_context & (batch.block_tables == DUMMY_BLOCK)
        return absent if absent.any() else None

    def _follow(
        self, batch: BatchInput, num_drafts: NDArray[np.int64], absent: NDArray[np.bool_] | None
    ) -> NDArray[np.bool_]:
        """Applies what this step writes; returns [requests, width] which blocks are then full of certain tokens.

        Blocks that are not on the device are none of these.
        """
        block_size = self._limits.block_size
        number = np.arange(batch.block_tables.shape[1])
        end = batch.num_computed + batch.num_scheduled
        first, last = batch.num_computed // block_size, (end - 1) // block_size
        is_written = (number >= first[:, None]) & (number <= last[:, None])
        self.summaries.written(batch.block_tables[is_written])
        is_full = number < ((end - num_drafts) // block_size)[:, None]
        if absent is not None:
            is_full &= ~absent
        self.summaries.full(batch.block_tables[is_full])
        return is_full

    def _decide(
        self,
        selection: SelectionInput,
        index: int,
        slot: int,
        decision: RequestSelection,
        open_blocks: NDArray[np.bool_],
        room: int,
    ) -> int:
        """Fills in the entry of one request; returns how many blocks it chooses."""
        mode = SelectionMode(decision.mode)
        stored = int(self.slots.num_stored[slot])
        if not stored:
            mode = SelectionMode.SELECT
        width = len(open_blocks)
        if mode == SelectionMode.REUSE:
            candidates = self.slots.candidates[slot, :width].copy()
            count = min(decision.num_selected, stored)
        else:
            candidates = open_blocks.copy()
            candidates[: decision.sink_blocks] = False
            candidates[decision.window_start :] = False
            count = min(decision.num_selected, int(candidates.sum()), self._limits.most)
        if not self._fits(count, int(candidates.sum()), room):
            self.slots.num_stored[slot] = 0
            return 0
        self._store(slot, mode, candidates, count)
        selection.modes[index], selection.counts[index] = mode, count
        selection.thresholds[index], selection.slots[index] = decision.update_threshold, slot
        selection.candidates[index] = candidates
        return count

    def _fits(self, count: int, candidates: int, room: int) -> bool:
        """Whether a request can be sparse in this step; without candidates its whole context is attended anyway."""
        if count == 0:
            return False
        fits = count <= room and candidates <= self._limits.most_candidates(count)
        self.totals.fallbacks += not fits
        return fits

    def _store(self, slot: int, mode: SelectionMode, candidates: NDArray[np.bool_], count: int) -> None:
        """What the device will have stored after the step."""
        if mode == SelectionMode.REUSE:
            return
        stored = min(int(candidates.sum()), self._limits.most)
        if mode == SelectionMode.CHECK and self.slots.num_stored[slot] >= count:
            # kept or replaced: only the device knows, so no more is used than both have
            stored = min(stored, int(self.slots.num_stored[slot]))
        self.slots.num_stored[slot] = stored
        self.slots.candidates[slot] = False
        self.slots.candidates[slot, : len(candidates)] = candidates


def _all_dense(batch: BatchInput, absent: NDArray[np.bool_] | None) -> SelectionInput:
    requests, width = batch.block_tables.shape
    counts, thresholds, slots = np.zeros((3, requests), np.int64)
    candidates = np.zeros((requests, width), np.bool_)
    modes = np.full(requests, DENSE, np.int64)
    return SelectionInput(modes, counts, thresholds, slots, candidates, absent)
