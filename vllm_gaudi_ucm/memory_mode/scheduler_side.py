"""KV offload in the scheduler: frees blocks of running requests, and takes blocks for those that come back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm_gaudi_ucm.memory_mode.moves import Moves
from vllm_gaudi_ucm.memory_mode.offload_state import OffloadState
from vllm_gaudi_ucm.memory_mode.placement import ScoreBook, dispensable_blocks, wanted_blocks
from vllm_gaudi_ucm.protocol.offload import OffloadOrders, OffloadReport, OffloadTotals

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_gaudi_ucm.memory_mode.options import MemoryModeOptions
    from vllm_gaudi_ucm.memory_mode.request_blocks import RequestBlocks
    from vllm_gaudi_ucm.sparse.options import BlockOptions
    from vllm_gaudi_ucm.vllm_api.steps import Request

# Moves that may be under way, in steps' worth of them.
STEPS_UNDER_WAY = 4

Fetched = dict[int, tuple[bytes, int]]
"""Logical block -> the connector's key of it, and the physical block that waits for it."""


OnWanted = Callable[[str, list[int]], None]
"""(request id, logical blocks) -> nothing."""


class OffloadScheduler:
    """Decides what leaves and what comes back; the worker moves it and reports.

    A block leaves once its copy is reported, and is in a table again once its load is: at every step both sides agree
    on the place of each block, and a late or lost block simply stays offloaded.

    Args:
        num_rows: blocks that may have a copy.
        num_ahead: most blocks that are brought to host memory before it is their turn to come back.
        on_wanted: called with the blocks that a request's query would choose among all, whenever it is scored.
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
        self.totals = OffloadTotals()
        self.method = method
        self.max_remainder = block_size
        """Most rows of a prompt that may be a sparse step: near each other, so that one choice serves them all."""
        self._options = options
        self._block_size = block_size
        self._num_ahead = num_ahead
        self._blocks = blocks
        self._states: dict[str, OffloadState] = {}
        self._numbers = count(1)
        self._scores = ScoreBook(options, method, block_size, self.totals)
        self._num_running = 0
        self._repeats: dict[str, Fetched] = {}
        self._on_wanted = on_wanted
        self._moves = Moves(blocks, num_rows, self.totals)

    @property
    def num_offloaded(self) -> int:
        """Blocks of live requests that are not on the device."""
        return sum(len(state.offloaded) for state in self._states.values())

    def begin(self, request_id: str) -> None:
        """A request whose blocks may leave."""
        self.end(request_id)
        self._states[request_id] = OffloadState(request_id, next(self._numbers))

    def end(self, request_id: str) -> None:
        """A request has ended; its table is vLLM's to free. One that never began is ignored."""
        state = self._states.pop(request_id, None)
        if state is None:
            return
        self._moves.end(state)

    def take_back(self, request: Request) -> None:
        """Gives a request that is about to be freed what the prefix cache still has of its offloaded blocks.

        They left in the order of their scores. All blocks are then freed in vLLM's order, so that the prefix cache
        loses the end of a context first: without a block in the middle, those behind it are of no use to later prompts.
        """
        state = self._states.get(request.request_id)
        if state is not None:
            self._moves.take_back(state, request)

    def dispensable(self, request_id: str, full: int, missing: Sequence[int]) -> list[int]:
        """Blocks of a stored prompt that its first step can do without, least wanted first. See dispensable_blocks."""
        if request_id not in self._states:
            return []
        return dispensable_blocks(full, missing, self._block_size, self._options.on_device_ratio, self.method)

    def has_gaps(self, request_id: str, num_rows: int) -> bool:
        """True if a step of `num_rows` rows, of a prompt too, is sparse because the request has offloaded blocks."""
        state = self._states.get(request_id)
        return state is not None and bool(state.offloaded) and num_rows <= self.max_remainder

    def is_guess(self, request_id: str) -> bool:
        """True if the next step of a request may be repeated."""
        state = self._states.get(request_id)
        return state is not None and state.is_guess

    def hide_guess(self, request: Request) -> None:
        """Hides blocks that a request fills in a step that may be repeated. Other requests must not find them before
        the step is final: they would be written again while others attend to them.
        """
        if self.is_guess(request.request_id):
            self._blocks.forget_cached(request.request_id, request.num_computed_tokens // self._block_size)

    def leave_stored(self, request_id: str, keys: Mapping[int, bytes]) -> dict[int, int]:
        """A connector loads all blocks of a request except these; its records are their copies. See Moves."""
        state = self._states[request_id]
        left = self._moves.leave_stored(state, keys)
        state.begin_guess(bool(left))
        return left

    def give_up(self, request: Request) -> None:
        """Handles a failed load of the connector: the request starts again, and its blocks may leave as before."""
        self._blocks.free_all(request)
        if request.request_id in self._states:
            self.begin(request.request_id)

    def preempted(self, request_ids: Iterable[str]) -> None:
        """These requests have lost their tables: whatever they compute again is on the device."""
        for request_id in request_ids:
            if request_id in self._states:
                self.begin(request_id)

    def before_scheduling(self, requests: Mapping[str, Request], num_running: int) -> None:
        """Frees and takes blocks before a step is scheduled, so that freed blocks serve it."""
        # a slow store must not fill the host's memory with blocks on their way
        most, states = self._options.moves_per_step, self._states.values()
        self._num_running = num_running
        saves = min(most, STEPS_UNDER_WAY * most - sum(len(state.saving) for state in states))
        loads = min(most, STEPS_UNDER_WAY * most - sum(len(state.loading) for state in states))
        for state in self._states.values():
            if not state.to_evict and not state.to_load:
                continue
            released, saves = self._moves.release(state, saves)
            # a block of its own in exchange, or a block that no running request needs next
            spare = max(released, self._blocks.num_spare(num_running))
            loads = self._moves.bring_back(state, requests[state.request_id], spare, loads)

    def orders(
        self, sparse: Collection[str], requests: Mapping[str, Request], computed: Iterable[tuple[str, int]]
    ) -> OffloadOrders:
        """Returns the orders to send with a step in which the requests `sparse` are.

        computed: each request of the step, and its tokens that were computed before.
        """
        guesses = [state for name in sparse if (state := self._states.get(name)) is not None and state.is_guess]
        # vLLM has entered these in the prefix cache already, but they are empty for requests that run before the one
        # that fills them: the step may be divided
        unwritten = self._blocks.blocks_to_write(computed) if guesses else set()
        for state in guesses:
            self._moves.find_cached(state, requests[state.request_id], unwritten)
        waiting = (
            (state.generation, number)
            for state in self._states.values()
            for number in state.to_load
            if number not in state.stored
        )
        self.totals.count_offloaded(self.num_offloaded)
        orders = msgspec.structs.replace(
            self._moves.take_orders(),
            ahead=list(islice(waiting, self._num_ahead)),
            totals=msgspec.structs.replace(self.totals),
        )
        for request_id in sparse:
            state = self._states.get(request_id)
            if state is None:
                continue
            state.idle_steps += 1
            if state.idle_steps >= state.next_scoring:
                orders.scored[request_id] = state.generation
        return orders

    def take_report(self, report: OffloadReport, scheduled: Collection[str] = ()) -> dict[str, Fetched]:
        """Takes the reports of a step, before the scheduler takes its output. Reports on earlier generations are
        ignored.

        Returns the requests among `scheduled` whose first step, on blocks that were loaded without a query, has missed
        too much, and the blocks that a connector has to load before it is repeated.
        """
        states = {state.generation: state for state in self._states.values()}
        for number, saved in [*((pair, True) for pair in report.saved), *((pair, False) for pair in report.unsaved)]:
            if number[0] in states:
                self._moves.take_save(states[number[0]], number[1], saved)
        for number, loaded in [*((pair, True) for pair in report.loaded), *((pair, False) for pair in report.failed)]:
            if number[0] in states:
                self._moves.take_load(states[number[0]], number[1], loaded)
        for generation, scores in report.scores.items():
            if generation in states:
                self._take_scores(states[generation], np.array(scores, np.float64))
        for state in self._states.values():
            if state.is_guess and state.request_id in scheduled:
                # how much it has missed is unknown
                self._repeat(state, sorted(state.offloaded))
        repeats, self._repeats = self._repeats, {}
        return repeats

    def _take_scores(self, state: OffloadState, scores: NDArray[np.float64]) -> None:
        if self._on_wanted is not None:
            self._on_wanted(state.request_id, wanted_blocks(scores, self._block_size, self.method))
        if self._scores.take_scores(state, scores):
            self._repeat(state, state.to_load)
            state.want(to_load=[number for number in state.to_load if number in state.offloaded])

    def _repeat(self, state: OffloadState, wanted: Sequence[int]) -> None:
        """Fetches blocks to repeat a first step; without a free block the step is not repeated."""
        state.end_guess()
        fetched = self._moves.fetch_stored(state, wanted, self._blocks.num_spare(self._num_running))
        if fetched:
            self._repeats[state.request_id] = fetched
            self.totals.repeated += 1

    def check_integrity(self) -> None:
        """Conservation: every full block has a copy or a device block; tables lack exactly the offloaded ones."""
        for state in self._states.values():
            state.check_integrity()
            table = self._blocks.table(state.request_id)
            absent = {number for number, block in enumerate(table) if block.is_null}
            if absent != state.offloaded:
                raise AssertionError(
                    f"KV offload of request {state.request_id!r}: offloaded {sorted(state.offloaded)}, "
                    f"absent {sorted(absent)}"
                )
        self._moves.rows.check_integrity([row for state in self._states.values() for row in state.rows.values()])
