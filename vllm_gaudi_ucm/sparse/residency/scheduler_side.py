"""Memory mode in the scheduler: frees blocks of running requests, and takes blocks for those that come back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count, islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm_gaudi_ucm.sparse.residency.life import Life
from vllm_gaudi_ucm.sparse.residency.messages import ResidencyOrders, ResidencyReport
from vllm_gaudi_ucm.sparse.residency.moves import Moves
from vllm_gaudi_ucm.sparse.residency.target import resident_target
from vllm_gaudi_ucm.sparse.residency.totals import ResidencyTotals

if TYPE_CHECKING:
    from numpy.typing import NDArray
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
        num_ahead: most blocks that are brought to host memory before it is their turn to come back.
    """

    def __init__(
        self,
        options: MemoryModeOptions,
        method: BlockOptions,
        block_size: int,
        blocks: RequestBlocks,
        num_rows: int,
        num_ahead: int = 0,
    ) -> None:
        self.totals = ResidencyTotals()
        self._options = options
        self._method = method
        self._block_size = block_size
        self._num_ahead = num_ahead
        self._blocks = blocks
        self._lives: dict[str, Life] = {}
        self._numbers = count(1)
        self._moves = Moves(blocks, num_rows, self.totals)

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
        self._moves.end(life)

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
            released, saves = self._moves.release(life, saves)
            # a block of its own in exchange, or one that no running request needs next
            spare = max(released, self._blocks.num_free - num_running)
            loads = self._moves.bring_back(life, requests[life.request_id], spare, loads)

    def orders(self, sparse: Iterable[str]) -> ResidencyOrders:
        """What to send with a step in which these requests are sparse."""
        orders = self._moves.take_orders()
        self.totals.away = self.num_away
        orders.totals = msgspec.structs.replace(self.totals)
        waiting = ((life.number, number) for life in self._lives.values() for number in life.coming)
        orders.ahead = list(islice(waiting, self._num_ahead))
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
                self._moves.take_save(lives[number[0]], number[1], saved)
        for number, loaded in [*((pair, True) for pair in report.loaded), *((pair, False) for pair in report.failed)]:
            if number[0] in lives:
                self._moves.take_load(lives[number[0]], number[1], loaded)
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
        self._moves.rows.check_integrity([row for life in self._lives.values() for row in life.rows.values()])

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
