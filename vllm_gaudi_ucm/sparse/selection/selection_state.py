"""The host's side of block selection: from the scheduler's decisions to what a step's plan chooses among."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.selection_plan import DENSE, SelectionInput
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.observability.room_metrics import SelectionTotals
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode
from vllm_gaudi_ucm.sparse.selection.block_scorer import SummaryQueue

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import BatchInput
    from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection


class ChoiceSlots:
    """One slot for each request with a stored choice. A request that loses its slot chooses anew.

    Args:
        num_slots: requests that can be running at once.
        width: logical blocks of the longest request.
    """

    def __init__(self, num_slots: int, width: int) -> None:
        # bool [slots, width]: the blocks that competed; int64 [slots]: how many ranks are stored, 0 without a choice
        self.candidates = np.zeros((num_slots, width), np.bool_)
        self.num_stored = np.zeros(num_slots, np.int64)
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots))[::-1]

    def slot(self, request_id: str, scheduled: Collection[str]) -> int:
        """The request's slot; a new one is taken from a request that is not scheduled where none is free."""
        slot = self._slots.get(request_id)
        if slot is None:
            if not self._free:
                self.forget([next(owner for owner in self._slots if owner not in scheduled)])
            slot = self._slots[request_id] = self._free.pop()
            self.num_stored[slot] = 0
        return slot

    def forget(self, request_ids: Iterable[str]) -> None:
        """Frees the slots of requests that have ended, or whose cache is gone; others are ignored."""
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)

    def check_integrity(self) -> None:
        """Conservation: every slot is free or owned by exactly one request."""
        if sorted([*self._slots.values(), *self._free]) != list(range(len(self.num_stored))):
            raise AssertionError(f"choice slots: owned {self._slots}, free {self._free}")


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
        some_offloaded: whether block tables have the dummy block where a block is not on the device.
    """

    def __init__(self, num_blocks: int, limits: SelectionLimits, bounded: bool, some_offloaded: bool = False) -> None:
        self.summaries = SummaryQueue(num_blocks)
        self.slots = ChoiceSlots(limits.max_num_seqs, limits.width)
        self.totals = SelectionTotals()
        # requests that chose since `begin_step`: their slot, and their full blocks
        self.chosen: dict[str, tuple[int, int]] = {}
        self._limits = limits
        self._bounded = bounded
        self._some_offloaded = some_offloaded

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
        absent = self._absent(batch) if self._some_offloaded else None
        is_full = self._follow(batch, num_drafts, absent)
        rows = int(batch.num_scheduled.sum())
        summary_blocks = self.summaries.take(self._limits.summaries(rows) if self._bounded else None)
        sparse = [index for index, request_id in enumerate(request_ids) if request_id in decisions]
        if not sparse and absent is None:
            return StepSelection(None, summary_blocks)
        selection = self._all_dense(batch, num_drafts, absent)
        # entries of a table beyond the request's tokens are undefined: only full blocks are read
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

    def _all_dense(
        self, batch: BatchInput, num_drafts: NDArray[np.int64], absent: NDArray[np.bool_] | None
    ) -> SelectionInput:
        requests, width = batch.block_tables.shape
        counts, thresholds, slots = np.zeros((3, requests), np.int64)
        candidates = np.zeros((requests, width), np.bool_)
        modes = np.full(requests, DENSE, np.int64)
        limits = self._limits
        return SelectionInput(
            modes, counts, thresholds, slots, candidates, limits.width, limits.most, absent, num_drafts
        )

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

        Blocks that are not on the device are left out.
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
        """Notes what the device will have stored after the step."""
        if mode == SelectionMode.REUSE:
            return
        stored = min(int(candidates.sum()), self._limits.most)
        if mode == SelectionMode.CHECK and self.slots.num_stored[slot] >= count:
            # kept or replaced: only the device knows, so no more is used than both have
            stored = min(stored, int(self.slots.num_stored[slot]))
        self.slots.num_stored[slot] = stored
        self.slots.candidates[slot] = False
        self.slots.candidates[slot, : len(candidates)] = candidates


@dataclass(frozen=True)
class SelectionLimits:
    """Sizes that bound every choice.

    sparse_ratio: at least this part of a context's full blocks is attended.
    live_blocks: most blocks of a request that are attended in any case: sinks, local window and the tail block.
    most: blocks chosen for the longest request.
    width: logical blocks of the longest request.
    max_num_seqs: requests of a step.
    max_rows: rows of a request with a choice: one, and its drafts.
    max_selected_blocks: blocks chosen in a step; a request that would exceed it is dense in that step.
    block_size: tokens per block.
    remainder_rows: rows of a prompt remainder that choose together in a graph of their own; 0: there is no such graph.
    max_spans: requests with a choice that a graph has room for; None: all of a step.
    """

    sparse_ratio: float
    live_blocks: int
    most: int
    width: int
    max_num_seqs: int
    max_rows: int
    max_selected_blocks: int
    block_size: int
    remainder_rows: int = 0
    max_spans: int | None = None

    def most_candidates(self, selected: int) -> int:
        """Candidates of a request that chooses this many: chosen and live blocks are `sparse_ratio` of its blocks."""
        return min(self.width, max(selected, math.floor((selected + self.live_blocks) / self.sparse_ratio)))

    def candidates(self, query_len: int, selected: int) -> int:
        """Candidates of all requests of a step with `query_len` rows and `selected` chosen blocks."""
        spans = min(self.spans(query_len) - 1, selected)
        bound = math.floor((selected + spans * self.live_blocks) / self.sparse_ratio)
        return min(spans * self.width, max(selected, bound))

    def spans(self, query_len: int) -> int:
        """Requests of a step with a choice, and one more without rows, for pads."""
        return min(query_len, self.max_spans or self.max_num_seqs) + 1

    def summaries(self, query_len: int) -> int:
        """Blocks that are summarised in a step: on average rows / block size become full in it."""
        return -(-query_len // self.block_size) + 1

    def of_remainder(self) -> SelectionLimits:
        """Limits of the graphs for prompt remainders: one request with many rows."""
        return replace(self, max_rows=self.remainder_rows, max_spans=1)
