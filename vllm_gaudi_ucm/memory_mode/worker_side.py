"""KV offload in the worker: carries out a step's orders before its forward, and reports after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.distributed.ranks import ALONE, Ranks
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.kv_cache.device_blocks import NO_MEMORY, DeviceBlocks
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.memory_mode.agreed_moves import AgreedMoves, EndedMove
from vllm_gaudi_ucm.protocol.offload import BlockMove, OffloadOrders, OffloadReport

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.device import Fence
    from vllm_gaudi_ucm.memory_mode.copies import CopyLoads, CopyStore, Pair
    from vllm_gaudi_ucm.observability.room_metrics import MemoryModeMetrics
    from vllm_gaudi_ucm.sparse.selection.block_scorer import BlockScorer
    from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionState

logger = plugin_logger(__name__)


class _Destination(NamedTuple):
    """The block that a load is written to, after the work that was launched before: it was another request's then."""

    block: int
    after: Fence


class StoredCopies(NamedTuple):
    """Brings back blocks whose copy is a connector's record: by its engine, in its order of layers."""

    loads: CopyLoads
    blocks: DeviceBlocks


class OffloadWorker:
    """Moves blocks of the device between two steps.

    Args:
        table: block tables of the live requests, which orders change.
        state: which blocks have a summary, and which requests chose in a step.
        device: its recipes end before and after a copy.
        stored: brings back blocks that a connector has left in its store; None: it leaves none.
        ranks: the ranks that have a part of each block, and get the same orders. Their reports are valid for all.
    """

    def __init__(
        self,
        table: RequestTable,
        state: SelectionState,
        scorer: BlockScorer,
        blocks: DeviceBlocks,
        copies: CopyStore,
        *,
        stored: StoredCopies | None = None,
        metrics: MemoryModeMetrics | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._table = table
        self._state = state
        self._scorer = scorer
        self._blocks = blocks
        self._copies = copies
        self._device = blocks.device
        # by generation and block: the row of a saved block's summary; by both: the target of a load
        self._rows: dict[int, dict[int, int]] = {}
        self._destinations: dict[Pair, _Destination] = {}
        self._scored: dict[str, int] = {}
        self._report = OffloadReport()
        self._metrics = metrics
        self._stored = stored
        self._moves = AgreedMoves(ranks)
        # loads that have ended on this rank: their blocks, and what writes them
        self._arrived: dict[Pair, tuple[memoryview, DeviceBlocks]] = {}

    def begin_step(self, orders: OffloadOrders) -> None:
        """Once the request table knows the step's requests, before the step is planned."""
        for generation in orders.ended:
            self._copies.end(generation)
            if self._stored is not None:
                self._stored.loads.end(generation)
            self._rows.pop(generation, None)
            self._moves.cancel(generation)
            self._destinations = {pair: place for pair, place in self._destinations.items() if pair[0] != generation}
            self._arrived = {pair: block for pair, block in self._arrived.items() if pair[0] != generation}
        for generation, number, row in orders.stored:
            self._rows.setdefault(generation, {})[number] = row
        for pair in orders.dropped:
            self._copies.drop(pair)
            del self._rows[pair[0]][pair[1]]
        for patch in orders.patches:
            self._table.set_block(patch.request_id, patch.number, patch.block)
        # a choice among other blocks is no longer valid
        self._state.forget({patch.request_id for patch in orders.patches})
        for move in orders.saves:
            self._save(move)
        self._take_finished()
        for move in orders.loads:
            self._load(move)
        self._copies.bring_near(orders.ahead)
        self._scored = orders.scored
        if self._metrics is not None:
            self._metrics.set(orders.totals)

    def report(self) -> OffloadReport:
        """Returns, after a step, everything since the last report. Waits for the device where a request is scored."""
        for request_id, generation in self._scored.items():
            chosen = self._state.chosen.get(request_id)
            # a request that did not fit chose nothing, and is asked for again
            if chosen is not None:
                self._report.scores[generation] = self._score(request_id, generation, *chosen)
        report, self._report, self._scored = self._report, OffloadReport(), {}
        return report

    def warm_up(self) -> None:
        """Has a device that compiles do so now: copies and scores, apart from each other as in serving."""
        self._device.end_recipe()
        self._scorer.keep_summary(DUMMY_BLOCK, 0)
        self._device.end_recipe()
        self._scorer.restore_summary(0, DUMMY_BLOCK)
        self._device.end_recipe()
        self._blocks.warm_up()
        nothing = np.full(1, -1, np.int64)
        self._scorer.scores(0, nothing, nothing)

    def close(self) -> None:
        self._copies.close()

    def _save(self, move: BlockMove) -> None:
        pair = move.generation, move.number
        self._rows.setdefault(move.generation, {})[move.number] = move.row
        self._moves.begin(pair, is_save=True)
        try:
            data = self._blocks.allocate(self._blocks.block_bytes)
        except NO_MEMORY as error:
            logger.warning("memory mode: no host memory for a copy: %s", error)
            self._moves.end(pair, is_done=False)
            return
        self._scorer.keep_summary(move.block, move.row)
        self._device.end_recipe()
        self._blocks.read([(move.block, data)])
        self._copies.save(pair, data)

    def _load(self, move: BlockMove) -> None:
        pair = move.generation, move.number
        self._destinations[pair] = _Destination(move.block, self._device.fence())
        self._moves.begin(pair, is_save=False)
        if not move.key:
            self._copies.load(pair)
            return
        assert self._stored is not None, "only a connector leaves blocks in its store"
        self._stored.loads.start(pair, move.key)

    def _take_finished(self) -> None:
        for pair, saved in self._copies.finished_saves():
            self._moves.end(pair, saved)
        for pair, data in self._copies.finished_loads():
            self._arrive(pair, data, self._blocks)
        if self._stored is not None:
            for pair, data in self._stored.loads.finished():
                self._arrive(pair, data, self._stored.blocks)
        for move in self._moves.take_ended():
            if move.is_save:
                self._end_save(move)
            else:
                self._end_load(move)

    def _arrive(self, pair: Pair, data: memoryview | None, blocks: DeviceBlocks) -> None:
        self._moves.end(pair, data is not None)
        if data is not None:
            self._arrived[pair] = data, blocks

    def _end_save(self, move: EndedMove) -> None:
        if move.is_done:
            self._report.saved.append(move.pair)
            return
        if move.was_done:
            # another rank could not: this copy will not be read
            self._copies.drop(move.pair)
        self._report.unsaved.append(move.pair)

    def _end_load(self, move: EndedMove) -> None:
        pair, (block, after) = move.pair, self._destinations.pop(move.pair)
        arrived = self._arrived.pop(pair, None)
        if not move.is_done:
            self._report.failed.append(pair)
            return
        assert arrived is not None, "done on every rank"
        data, blocks = arrived
        blocks.write(block, data, after)
        # its summary has stayed, and need not be made again
        self._device.end_recipe()
        self._scorer.restore_summary(self._rows[pair[0]][pair[1]], block)
        self._device.end_recipe()
        self._state.summaries.brought(np.array([block]))
        self._report.loaded.append(pair)

    def _score(self, request_id: str, generation: int, slot: int, num_full: int) -> list[float]:
        blocks: NDArray[np.int64] = self._table.blocks(request_id, num_full).astype(np.int64)
        rows = np.full(num_full, -1, np.int64)
        for number, row in self._rows.get(generation, {}).items():
            if blocks[number] == 0:
                rows[number] = row
        blocks[(blocks == 0) | ~self._state.summaries.ready[blocks]] = -1
        self._device.end_recipe()
        return list(self._scorer.scores(slot, blocks, rows).tolist())
