"""Memory mode in the scheduler: frees blocks of running requests, and takes blocks for those that come back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm_gaudi_ucm.sparse.residency.life import Life
from vllm_gaudi_ucm.sparse.residency.messages import BlockMove, ResidencyOrders, ResidencyReport, TablePatch
from vllm_gaudi_ucm.sparse.residency.rows import Rows
from vllm_gaudi_ucm.sparse.residency.target import resident_target
from vllm_gaudi_ucm.sparse.residency.totals import ResidencyTotals

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_gaudi_ucm.sparse.options import BlockOptions
    from vllm_gaudi_ucm.sparse.residency.options import MemoryModeOptions
    from vllm_gaudi_ucm.sparse.residency.request_blocks import RequestBlocks

# Moves that may be under way, in steps' worth of them.
STEPS_UNDER_WAY = 4


class ResidencyScheduler:
    """Decides what leaves and what comes back; the worker moves it and reports.

    A block leaves once its copy is reported, and is in a table again once its load is: at every step both sides agree
    which block is where, and a block that is late or lost is away and nothing else.

    Args:
        options: of memory mode.
        method: options of the method that chooses blocks.
        block_size: tokens per block.
        blocks: tables and free blocks.
        num_rows: blocks that may have a copy.
    """

    def __init__(
        self, options: MemoryModeOptions, method: BlockOptions, block_size: int, blocks: RequestBlocks, num_rows: int
    ) -> None:
        self.totals = ResidencyTotals()
        self._options = options
        self._method = method
        self._block_size = block_size
        self._blocks = blocks
        self._rows = Rows(num_rows)
        self._lives: dict[str, Life] = {}
        self._numbers = count(1)
        self._orders = ResidencyOrders()

    @property
    def num_away(self) -> int:
        """Blocks of live requests that are not on the device."""
        return sum(len(life.away) for life in self._lives.values())

    def begin(self, request_id: str) -> None:
        """A request whose blocks may leave."""
        self.end(request_id)
        self._lives[request_id] = Life(request_id, next(self._numbers))

    def end(self, request_id: str) -> None:
        """A request has ended; its table is vLLM's to free. One that never began is ignored."""
        life = self._lives.pop(request_id, None)
        if life is None:
            return
        self._blocks.give_back(list(life.loading.values()))
        self._rows.give_back(life.rows.values())
        self._orders.ended.append(life.number)

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Requests whose tables are gone: what they compute again is on the device, all of it."""
        for request_id in request_ids:
            if request_id in self._lives:
                self.begin(request_id)

    def before_scheduling(self, requests: Mapping[str, Request], num_running: int) -> None:
        """Frees and takes blocks, so that what is freed serves the step that is about to be scheduled."""
        # a slow store must not fill the host's memory with blocks on their way
        most, lives = self._options.moves_per_step, self._lives.values()
        saves = min(most, STEPS_UNDER_WAY * most - sum(len(life.saving) for life in lives))
        loads = min(most, STEPS_UNDER_WAY * most - sum(len(life.loading) for life in lives))
        for life in self._lives.values():
            if not life.leaving and not life.coming:
                continue
            released, saves = self._release(life, saves)
            # a block of its own in exchange, or one that no running request needs next
            spare = max(released, self._blocks.num_free - num_running)
            loads = self._bring_back(life, requests[life.request_id], spare, loads)

    def orders(self, sparse: Iterable[str]) -> ResidencyOrders:
        """What to send with a step in which these requests are sparse. Lives that are over have no moves any more."""
        orders, self._orders = self._orders, ResidencyOrders()
        ended = set(orders.ended)
        orders.saves = [move for move in orders.saves if move.life not in ended]
        orders.loads = [move for move in orders.loads if move.life not in ended]
        orders.dropped = [pair for pair in orders.dropped if pair[0] not in ended]
        orders.patches = [patch for patch in orders.patches if patch.life not in ended]
        self.totals.away = self.num_away
        orders.totals = msgspec.structs.replace(self.totals)
        for request_id in sparse:
            life = self._lives.get(request_id)
            if life is None:
                continue
            life.idle_steps += 1
            if life.idle_steps >= life.next_scoring:
                orders.scored[request_id] = life.number
        return orders

    def take(self, report: ResidencyReport) -> None:
        """Before the scheduler takes the output of the step. What is said of lives that are over is ignored."""
        lives = {life.number: life for life in self._lives.values()}
        for number, saved in [*((pair, True) for pair in report.saved), *((pair, False) for pair in report.unsaved)]:
            if number[0] in lives:
                self._take_save(lives[number[0]], number[1], saved)
        for number, loaded in [*((pair, True) for pair in report.loaded), *((pair, False) for pair in report.failed)]:
            if number[0] in lives:
                self._take_load(lives[number[0]], number[1], loaded)
        for life_number, scores in report.scores.items():
            if life_number in lives:
                self._take_scores(lives[life_number], scores)

    def check_integrity(self) -> None:
        """Conservation: of every full block there is a copy or a device block; tables lack exactly what is away."""
        for life in self._lives.values():
            life.check_integrity()
            table = self._blocks.table(life.request_id)
            absent = {number for number, block in enumerate(table) if block.is_null}
            if absent != life.away:
                raise AssertionError(
                    f"memory mode of request {life.request_id!r}: away {sorted(life.away)}, absent {sorted(absent)}"
                )
        self._rows.check_integrity([row for life in self._lives.values() for row in life.rows.values()])

    def _release(self, life: Life, saves: int) -> tuple[int, int]:
        """Releases what has a copy and orders copies of the rest; returns (released blocks, copies still allowed)."""
        released, waiting = 0, []
        for number in life.leaving:
            if number in life.away or not self._blocks.is_owned_alone(life.request_id, number):
                continue
            if number in life.saved:
                self._blocks.release(life.request_id, number)
                life.away.add(number)
                self._orders.patches.append(TablePatch(life.number, life.request_id, number, 0))
                released += 1
                continue
            row = self._take_row(life) if saves > 0 and number not in life.saving else None
            if row is not None:
                saves -= 1
                life.rows[number] = row
                life.saving.add(number)
                block = self._blocks.table(life.request_id)[number].block_id
                self._orders.saves.append(BlockMove(life.number, number, block, row))
            waiting.append(number)
        life.leaving = waiting
        self.totals.released += released
        return released, saves

    def _take_row(self, life: Life) -> int | None:
        """A free row, or that of a block of the same request that is back on the device and stays there."""
        row = self._rows.take()
        if row is None:
            back = next((number for number in life.saved - life.away if number not in life.leaving), None)
            if back is not None:
                life.saved.discard(back)
                self._orders.dropped.append((life.number, back))
                row = life.rows.pop(back)
        return row

    def _bring_back(self, life: Life, request: Request, spare: int, loads: int) -> int:
        """Brings back what can be found, and orders loads of the rest; returns the loads still allowed."""
        waiting = []
        for number in life.coming:
            if spare <= 0 or loads <= 0:
                waiting.append(number)
                continue
            found = self._blocks.take_cached(request, number)
            spare -= 1
            if found is not None:
                self._return(life, number, found)
                self.totals.found += 1
                continue
            loads -= 1
            block = life.loading[number] = self._blocks.take()
            self._orders.loads.append(BlockMove(life.number, number, block.block_id, life.rows[number]))
        life.coming = waiting
        return loads

    def _return(self, life: Life, number: int, block: KVCacheBlock) -> None:
        self._blocks.put(life.request_id, number, block)
        life.away.discard(number)
        self._orders.patches.append(TablePatch(life.number, life.request_id, number, block.block_id))

    def _take_save(self, life: Life, number: int, saved: bool) -> None:
        life.saving.discard(number)
        if saved:
            life.saved.add(number)
            self.totals.saved += 1
            return
        self.totals.unsaved += 1
        self._rows.give_back([life.rows.pop(number)])
        life.leaving = [other for other in life.leaving if other != number]

    def _take_load(self, life: Life, number: int, loaded: bool) -> None:
        block = life.loading.pop(number)
        if loaded:
            self._return(life, number, block)
            self.totals.loaded += 1
            return
        self.totals.failed += 1
        life.lost.add(number)
        self._blocks.give_back([block])

    def _take_scores(self, life: Life, scores: list[float]) -> None:
        fresh = np.array(scores, np.float64)
        self._measure_missed(life, fresh)
        if life.scores is not None and self._options.history_decay:
            known = life.scores[: len(fresh)]
            both = (known >= 0) & (fresh[: len(known)] >= 0)
            fresh[: len(known)][both] += self._options.history_decay * known[both]
        if life.scores is not None:
            life.next_scoring = min(2 * life.next_scoring, self._options.refresh_steps)
        life.scores, life.idle_steps = fresh, 0
        life.leaving, life.coming = resident_target(
            fresh,
            life.away,
            life.lost | set(life.loading),
            self._block_size,
            1.0 if life.stays else self._options.resident_ratio,
            len(fresh) if life.stays else self._options.moves_per_step,
            self._method,
        )

    def _measure_missed(self, life: Life, scores: NDArray[np.float64]) -> None:
        """How much the query of these scores would have liked to see of what is away."""
        missed = scores[sorted(life.away)].clip(0).sum() / max(scores.clip(0).sum(), 1e-9)
        self.totals.scored += 1
        self.totals.missed += float(missed)
        if missed > self._options.max_missed and not life.stays:
            life.stays = True
            self.totals.kept += 1
