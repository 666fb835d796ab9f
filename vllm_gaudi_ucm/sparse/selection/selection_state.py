"""The host's side of block selection: turns the scheduler's decisions into the candidates of a step's plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.selection_plan import DENSE, SelectionInput
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.observability.room_metrics import SelectionTotals
from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection, SelectionMode
from vllm_gaudi_ucm.sparse.selection.block_scorer import SummaryQueue
from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits
from vllm_gaudi_ucm.sparse.selection.steady_choices import TILE_ROWS, Choice, SteadyChoices
from vllm_gaudi_ucm.sparse.selection.steady_decodes import SteadyDecodes

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import BatchInput


class ChoiceSlots:
    """Slots, one for each request with a stored choice. A request that loses its slot chooses anew.

    Args:
        num_slots: requests that can be running at once.
        width: logical blocks of the longest request.
    """

    def __init__(self, num_slots: int, width: int) -> None:
        # bool [slots, width]: the blocks that competed; int64 [slots]: how many ranks are stored, 0 without a choice
        # and a last slot, of choices that are not stored
        self.candidates = np.zeros((num_slots + 1, width), np.bool_)
        self.num_stored = np.zeros(num_slots + 1, np.int64)
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots))[::-1]

    def slot(self, request_id: str, scheduled: Collection[str]) -> int:
        """Returns the request's slot; if no slot is free, a new one is taken from a request that is not scheduled."""
        slot = self._slots.get(request_id)
        if slot is None:
            if not self._free:
                self.forget([next(owner for owner in self._slots if owner not in scheduled)])
            slot = self._slots[request_id] = self._free.pop()
            self.num_stored[slot] = 0
        return slot

    def forget(self, request_ids: Iterable[str]) -> None:
        """Frees the slots of requests that have ended, or whose cache is gone; others are ignored."""
        # a set of names has a different order in each process, and all ranks must give the next request the same slot
        for request_id in sorted(request_ids):
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)

    def check_integrity(self) -> None:
        """Checks that every slot is free or owned by exactly one request."""
        if sorted([*self._slots.values(), *self._free]) != list(range(len(self.num_stored) - 1)):
            raise AssertionError(f"choice slots: owned {self._slots}, free {self._free}")


class StepSelection(NamedTuple):
    """The candidates of a step's plan (None: every request is dense), and the blocks to summarise in the step.

    summary_blocks: int64 [n] physical block ids.
    """

    input: SelectionInput | None
    summary_blocks: NDArray[np.int64]


_DECISION = attrgetter("mode", "sink_blocks", "window_start", "num_selected", "update_threshold", "tile_rows")
DENSE_STEP = StepSelection(None, np.zeros(0, np.int64))


class SelectionState:
    """Follows every block that is written and every choice that is stored.

    Args:
        num_blocks: number of blocks of the KV cache.
        bounded: whether a step has room only for `limits.summaries`; at true shapes it has as much as it needs.
        some_offloaded: whether block tables have the dummy block for blocks that are not on the device.
    """

    def __init__(self, num_blocks: int, limits: SelectionLimits, bounded: bool, some_offloaded: bool = False) -> None:
        self.summaries = SummaryQueue(num_blocks)
        self.slots = ChoiceSlots(limits.max_num_seqs, limits.width)
        self.totals = SelectionTotals()
        # requests that chose since `begin_step`: their slots and numbers of full blocks
        self.chosen: dict[str, tuple[int, int]] = {}
        self._limits = limits
        self._bounded = bounded
        self._some_offloaded = some_offloaded
        self._steady = SteadyDecodes(limits.block_size)
        self._choices = SteadyChoices(limits.block_size)
        # the value of `summaries.changes` after the last step
        self._changes = 0

    def begin_step(self) -> None:
        """Called before the step, or its first division."""
        self.chosen.clear()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forgets the stored choices of requests that have ended, begin, or were preempted."""
        self.slots.forget(request_ids)
        self._steady.forget()
        self._choices.forget()

    def step(
        self,
        request_ids: Sequence[str],
        batch: BatchInput,
        num_drafts: NDArray[np.int64],
        decisions: Mapping[str, RequestSelection],
    ) -> StepSelection:
        """Called once per step (or division of one), before it is planned.

        Args:
            request_ids: ids of the scheduled requests, in the order of `batch`.
            num_drafts: [requests] how many of a request's new tokens may turn out wrong.
            decisions: the scheduler's decisions for sparse requests.
        """
        if not decisions and self._is_steady(request_ids, batch):
            return DENSE_STEP
        asked = [request_id for request_id in request_ids if request_id in decisions]
        told = np.array([_DECISION(decisions[one]) for one in asked], np.int64)
        again = self._choose_again(request_ids, batch, num_drafts, asked, told)
        if again is not None:
            return again
        absent = self._absent(batch) if self._some_offloaded else None
        is_full, is_ready = self._follow(batch, num_drafts, absent)
        summary_blocks = self._take_blocks(batch)
        self._steady.follow(request_ids, batch, num_drafts)
        if not asked and absent is None:
            return StepSelection(None, summary_blocks)
        selection = self._all_dense(batch, num_drafts, absent)
        if asked:
            if len(summary_blocks):
                is_ready = self.summaries.is_ready(batch.block_tables)
            index = np.array([place for place, one in enumerate(request_ids) if one in decisions], np.int64)
            # entries of a table beyond the request's tokens are undefined: only full blocks count
            open_blocks = is_full[index] & is_ready[index]
            tiles, no_slot = told[:, TILE_ROWS], self._limits.max_num_seqs
            if tiles.any():
                selection = selection.in_tiles(index, tiles, self._limits.row_step)
            keeps = zip(asked, tiles.tolist(), strict=True)
            slots = np.array([no_slot if tile else self.slots.slot(one, request_ids) for one, tile in keeps], np.int64)
            counts = self._decide(selection, index, slots, told, open_blocks)
            choice = Choice(asked, index, slots, counts, told, selection)
            self._count(batch, num_drafts, choice)
            if absent is None:
                self._choices.follow(request_ids, batch, num_drafts, choice)
        if absent is None and (selection.modes == DENSE).all():
            return StepSelection(None, summary_blocks)
        return StepSelection(selection, summary_blocks)

    def _choose_again(
        self,
        request_ids: Sequence[str],
        batch: BatchInput,
        num_drafts: NDArray[np.int64],
        asked: Sequence[str],
        told: NDArray[np.int64],
    ) -> StepSelection | None:
        """Returns the choices of the previous step if they are made again, or None."""
        if not asked or self._has_changed():
            self._choices.forget()
            return None
        found = self._choices.go_on(request_ids, batch, num_drafts, asked, told)
        if found is None:
            return None
        choice, new = found
        if len(new.begun):
            self.summaries.written(new.begun)
        if len(new.filled):
            self.summaries.full(new.filled)
        summary_blocks = self._take_blocks(batch)
        self._steady.forget()
        self._count(batch, num_drafts, choice)
        return StepSelection(choice.selection, summary_blocks)

    def _take_blocks(self, batch: BatchInput) -> NDArray[np.int64]:
        """Returns the blocks to summarise in a step whose blocks were followed."""
        room = self._limits.summaries(int(batch.num_scheduled.sum())) if self._bounded else None
        blocks = self.summaries.take_blocks(room)
        self._changes = self.summaries.changes
        return blocks

    def _has_changed(self) -> bool:
        """Returns whether blocks or summaries may have changed since the last step."""
        return self._some_offloaded or self.summaries.waits or self.summaries.changes != self._changes

    def _is_steady(self, request_ids: Sequence[str], batch: BatchInput) -> bool:
        """Returns whether all blocks are as the previous step left them, except for one more token in each last one."""
        if self._has_changed():
            self._steady.forget()
            return False
        return self._steady.go_on(request_ids, batch)

    def _count(self, batch: BatchInput, num_drafts: NDArray[np.int64], choice: Choice) -> None:
        """Records which requests have chosen, in `chosen` and in the totals."""
        index, slots, counts, selection = choice.index, choice.slots, choice.counts, choice.selection
        block_size = self._limits.block_size
        end = (batch.num_computed + batch.num_scheduled)[index].astype(np.int64)
        num_full, context_blocks = (end - num_drafts[index]) // block_size, -(-end // block_size)
        chose, keeps = counts > 0, slots < self._limits.max_num_seqs
        entries = zip(choice.asked, slots.tolist(), num_full.tolist(), (chose & keeps).tolist(), strict=True)
        self.chosen.update({one: (slot, full) for one, slot, full, has_chosen in entries if has_chosen})
        if selection.tile_rows is not None:
            # a tile counts as a request; few steps have one, and a repeat costs more than the counting
            rows, tile = batch.num_scheduled[index].astype(np.int64), selection.tile_rows[index]
            spans = np.where(tile > 0, -(-rows // np.maximum(tile, 1)), 1)
            chose, counts, context_blocks = chose.repeat(spans), counts.repeat(spans), context_blocks.repeat(spans)
            selection = selection.take(index.repeat(spans))
            index = np.arange(len(chose))
        # one call for all modes: each call costs more than its counting
        modes = np.bincount(selection.modes[index[chose]], minlength=len(SelectionMode))
        for mode, count in zip(SelectionMode, modes.tolist(), strict=True):
            self.totals.modes[mode] += count
        seen, candidates = int(context_blocks[chose].sum()), int(np.count_nonzero(selection.candidates))
        self.totals.context_blocks += seen
        self.totals.attended_blocks += seen - candidates + int(counts.sum())

    def _all_dense(
        self, batch: BatchInput, num_drafts: NDArray[np.int64], absent: NDArray[np.bool_] | None
    ) -> SelectionInput:
        requests, width = batch.block_tables.shape
        counts, thresholds, slots = np.zeros((3, requests), np.int64)
        candidates = np.zeros((requests, width), np.bool_)
        modes = np.full(requests, DENSE, np.int64)
        limits = self._limits
        return SelectionInput(
            modes=modes,
            counts=counts,
            thresholds=thresholds,
            slots=slots,
            candidates=candidates,
            width=limits.width,
            most=limits.most,
            absent=absent,
            num_drafts=num_drafts,
        )

    def _absent(self, batch: BatchInput) -> NDArray[np.bool_] | None:
        """Returns [requests, width] blocks of the contexts that are not on the device; None if all are."""
        end = (batch.num_computed + batch.num_scheduled) // self._limits.block_size
        is_context = np.arange(batch.block_tables.shape[1]) < end[:, None]
        absent = is_context & (batch.block_tables == DUMMY_BLOCK)
        return absent if absent.any() else None

    def _follow(
        self, batch: BatchInput, num_drafts: NDArray[np.int64], absent: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Applies what this step writes; returns, [requests, width] each, which blocks are then full of certain tokens,
        and which have a summary (undefined for blocks that are not full).

        Blocks that are not on the device are not full.
        """
        block_size, tables = self._limits.block_size, batch.block_tables
        number = np.arange(tables.shape[1], dtype=np.int32)
        end = batch.num_computed + batch.num_scheduled
        first, last = batch.num_computed // block_size, (end - 1) // block_size
        if (first == last).all():
            written = tables[np.arange(len(first)), first]
        else:
            written = tables[(number >= first[:, None]) & (number <= last[:, None])]
        self.summaries.written(written)
        is_full = number < ((end - num_drafts) // block_size).astype(np.int32)[:, None]
        if absent is not None:
            is_full &= ~absent
        is_ready = self.summaries.is_ready(tables)
        missing = is_full & ~is_ready
        if missing.any():
            self.summaries.full(tables[missing])
        return is_full, is_ready

    def _decide(
        self,
        selection: SelectionInput,
        index: NDArray[np.int64],
        slots: NDArray[np.int64],
        told: NDArray[np.int64],
        open_blocks: NDArray[np.bool_],
    ) -> NDArray[np.int64]:
        """Fills in the entries of the sparse requests; returns how many blocks each chooses, 0 if it is dense.

        index, slots: int64 [sparse]. told: int64 [sparse, 6], the scheduler's decisions. open_blocks: bool [sparse,
        width] full blocks with a summary.
        """
        modes, wanted, thresholds = told[:, 0], told[:, 3], told[:, 4]
        width, stored = open_blocks.shape[1], self.slots.num_stored[slots]
        modes = np.where(stored == 0, SelectionMode.SELECT, modes)
        reuse = modes == SelectionMode.REUSE
        number = np.arange(width, dtype=np.int32)
        bounds = told[:, 1:3].astype(np.int32)
        candidates = open_blocks & (number >= bounds[:, :1])
        candidates &= number < bounds[:, 1:]
        if reuse.any():
            candidates[reuse] = self.slots.candidates[slots[reuse], :width]
        competing = np.count_nonzero(candidates, axis=1)
        counts = np.minimum(wanted, np.where(reuse, stored, np.minimum(competing, self._limits.most)))
        counts[~self._fit(counts, competing, told[:, TILE_ROWS] > 0)] = 0
        chose = counts > 0
        self.slots.num_stored[slots[~chose]] = 0
        self._store(slots, modes, candidates, competing, counts, stored)
        candidates &= chose[:, None]
        selection.candidates[index] = candidates
        selection.modes[index] = np.where(chose, modes, DENSE)
        selection.counts[index] = counts
        selection.thresholds[index], selection.slots[index] = thresholds * chose, slots * chose
        return counts

    def _fit(
        self, counts: NDArray[np.int64], competing: NDArray[np.int64], is_prompt: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Returns bool [sparse]: which requests can be sparse in this step, in order as long as there is room. A prompt
        has room of its own.
        """
        most = self._limits.most_candidates(counts)
        if is_prompt.any():
            most = np.where(is_prompt, self._limits.of_tiles().most_candidates(counts), most)
        fits = (counts > 0) & (competing <= most)
        room, sharing = self._limits.max_selected_blocks, fits & ~is_prompt
        if int(counts[sharing].sum()) > room:
            for one in sharing.nonzero()[0].tolist():
                fits[one] = counts[one] <= room
                room -= int(counts[one]) * bool(fits[one])
        # without candidates the whole context is attended anyway
        self.totals.fallbacks += int(np.count_nonzero((counts > 0) & ~fits))
        return fits

    def _store(
        self,
        slots: NDArray[np.int64],
        modes: NDArray[np.int64],
        candidates: NDArray[np.bool_],
        competing: NDArray[np.int64],
        counts: NDArray[np.int64],
        stored: NDArray[np.int64],
    ) -> None:
        """Records what the device will have stored after the step; [sparse] each, candidates [sparse, width]."""
        fresh = (counts > 0) & (modes != SelectionMode.REUSE) & (slots < self._limits.max_num_seqs)
        if not fresh.any():
            return
        now = np.minimum(competing, self._limits.most)
        # only the device knows whether it was kept or replaced, so no more is used than both have
        both = (modes == SelectionMode.CHECK) & (stored >= counts)
        now[both] = np.minimum(now, stored)[both]
        into = slots[fresh]
        self.slots.num_stored[into] = now[fresh]
        self.slots.candidates[into, : candidates.shape[1]] = candidates[fresh]
        self.slots.candidates[into, candidates.shape[1] :] = False
