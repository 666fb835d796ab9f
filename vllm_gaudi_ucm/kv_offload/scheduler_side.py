"""Memory mode in the scheduler: frees blocks of running requests, and takes blocks for those that come back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm_gaudi_ucm.kv_offload.moves import Moves
from vllm_gaudi_ucm.kv_offload.request_blocks import Life, dispensable_blocks
from vllm_gaudi_ucm.kv_offload.targets import ScoreBook, wanted_blocks
from vllm_gaudi_ucm.protocol.offload import ResidencyOrders, ResidencyReport, ResidencyTotals

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_gaudi_ucm.kv_offload.options import MemoryModeOptions
    from vllm_gaudi_ucm.kv_offload.request_blocks import RequestBlocks
    from vllm_gaudi_ucm.sparse.options import BlockOptions
    from vllm_gaudi_ucm.vllm_api.steps import Request

# Moves that may be under way, in steps' worth of them.
STEPS_UNDER_WAY = 4

Fetched = dict[int, tuple[bytes, int]]
"""Logical block -> the connector's key of it, and the physical block that waits for it."""


OnWanted = Callable[[str, list[int]], None]
"""(request id, logical blocks) -> nothing."""


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
        on_wanted: called with the blocks that a request's query would choose of all, whenever it is scored.
    """

    def __init__(
        self,
        options: MemoryModeOptions,
        method: BlockOptions,
        block_size: int,
        blocks: RequestBlocks,
        num_rows: int,
        num_ahead: int = 0,
        on_wanted: OnWanted | None = None,
    ) -> None:
        self.totals = ResidencyTotals()
        self.method = method
        self.max_tail = block_size
        """Most rows of a prompt that may be a sparse step: near each other, so that one choice serves them all."""
        self._options = options
        self._block_size = block_size
        self._num_ahead = num_ahead
        self._blocks = blocks
        self._lives: dict[str, Life] = {}
        self._numbers = count(1)
        self._scores = ScoreBook(options, method, block_size, self.totals)
        self._num_running = 0
        self._repeats: dict[str, Fetched] = {}
        self._on_wanted = on_wanted
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

    def dispensable(self, request_id: str, full: int, missing: Sequence[int]) -> list[int]:
        """Blocks of a stored prompt that its first step can do without, least wanted first. See dispensable_blocks."""
        if request_id not in self._lives:
            return []
        return dispensable_blocks(full, missing, self._block_size, self._options.resident_ratio, self.method)

    def has_gaps(self, request_id: str, num_rows: int) -> bool:
        """Whether a step of so many rows, of a prompt too, is sparse because blocks of the request are away."""
        life = self._lives.get(request_id)
        return life is not None and bool(life.away) and num_rows <= self.max_tail

    def is_guess(self, request_id: str) -> bool:
        """Whether the next step of a request may be repeated."""
        life = self._lives.get(request_id)
        return life is not None and life.is_guess

    def hide_guess(self, request: Request) -> None:
        """A request was allotted slots to compute. What it fills in a step that may be repeated is not found by others
        before that step stands: it would be written again while they attend to it."""
        if self.is_guess(request.request_id):
            self._blocks.forget_cached(request.request_id, request.num_computed_tokens // self._block_size)

    def leave_stored(self, request_id: str, keys: Mapping[int, bytes]) -> dict[int, int]:
        """A connector loads all blocks of a request but these, whose records are their copies. See Moves."""
        life = self._lives[request_id]
        left = self._moves.leave_stored(life, keys)
        life.is_guess = bool(left)
        return left

    def give_up(self, request: Request) -> None:
        """What the connector was to load did not come: the request has no blocks any more, and begins anew."""
        self._blocks.free_all(request)
        self.begin(request.request_id)

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Requests whose tables are gone: what they compute again is on the device, all of it."""
        for request_id in request_ids:
            if request_id in self._lives:
                self.begin(request_id)

    def before_scheduling(self, requests: Mapping[str, Request], num_running: int) -> None:
        """Frees and takes blocks, so that what is freed serves the step that is about to be scheduled."""
        # a slow store must not fill the host's memory with blocks on their way
        most, lives = self._options.moves_per_step, self._lives.values()
        self._num_running = num_running
        saves = min(most, STEPS_UNDER_WAY * most - sum(len(life.saving) for life in lives))
        loads = min(most, STEPS_UNDER_WAY * most - sum(len(life.loading) for life in lives))
        for life in self._lives.values():
            if not life.leaving and not life.coming:
                continue
            released, saves = self._moves.release(life, saves)
            # a block of its own in exchange, or one that no running request needs next
            spare = max(released, self._blocks.num_free - num_running)
            loads = self._moves.bring_back(life, requests[life.request_id], spare, loads)

    def orders(
        self, sparse: Collection[str], requests: Mapping[str, Request], computed: Iterable[tuple[str, int]]
    ) -> ResidencyOrders:
        """What to send with a step in which the requests `sparse` are.

        computed: each request of the step, and its tokens that were computed before.
        """
        guesses = [life for name in sparse if (life := self._lives.get(name)) is not None and life.is_guess]
        # vLLM has entered these in the prefix cache already, but whoever runs before the request that fills them finds
        # nothing in them: the step may be divided
        unwritten = self._blocks.blocks_to_write(computed) if guesses else set()
        for life in guesses:
            self._moves.find_cached(life, requests[life.request_id], unwritten)
        orders = self._moves.take_orders()
        self.totals.away = self.num_away
        orders.totals = msgspec.structs.replace(self.totals)
        waiting = (
            (life.number, number)
            for life in self._lives.values()
            for number in life.coming
            if number not in life.stored
        )
        orders.ahead = list(islice(waiting, self._num_ahead))
        for request_id in sparse:
            life = self._lives.get(request_id)
            if life is None:
                continue
            life.idle_steps += 1
            if life.idle_steps >= life.next_scoring:
                orders.scored[request_id] = life.number
        return orders

    def take(self, report: ResidencyReport, scheduled: Collection[str] = ()) -> dict[str, Fetched]:
        """Before the scheduler takes the output of the step. What is said of lives that are over is ignored.

        Returns, of the requests `scheduled` in the step, those whose first step on blocks that were loaded without a
        query has missed too much: it is to be repeated, once a connector has loaded these.
        """
        lives = {life.number: life for life in self._lives.values()}
        for number, saved in [*((pair, True) for pair in report.saved), *((pair, False) for pair in report.unsaved)]:
            if number[0] in lives:
                self._moves.take_save(lives[number[0]], number[1], saved)
        for number, loaded in [*((pair, True) for pair in report.loaded), *((pair, False) for pair in report.failed)]:
            if number[0] in lives:
                self._moves.take_load(lives[number[0]], number[1], loaded)
        for life_number, scores in report.scores.items():
            if life_number in lives:
                self._take_scores(lives[life_number], np.array(scores, np.float64))
        for life in self._lives.values():
            if life.is_guess and life.request_id in scheduled:
                # nobody knows what it has missed
                self._repeat(life, sorted(life.away))
        repeats, self._repeats = self._repeats, {}
        return repeats

    def _take_scores(self, life: Life, scores: NDArray[np.float64]) -> None:
        if self._on_wanted is not None:
            self._on_wanted(life.request_id, wanted_blocks(scores, self._block_size, self.method))
        if self._scores.take(life, scores):
            self._repeat(life, life.coming)
            life.coming = [number for number in life.coming if number in life.away]

    def _repeat(self, life: Life, wanted: Sequence[int]) -> None:
        """Has blocks fetched for a first step to be repeated; without a free block it stands."""
        life.is_guess = False
        fetched = self._moves.fetch_stored(life, wanted, self._blocks.num_free - self._num_running)
        if fetched:
            self._repeats[life.request_id] = fetched
            self.totals.repeated += 1

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
