"""Gives requests consecutive blocks, and moves some blocks in use down before a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.block_policies.compaction.compaction import Compaction
from vllm_gaudi_ucm.block_policies.compaction.free_runs import NO_BLOCK, FreeRuns
from vllm_gaudi_ucm.block_policies.policy import BlockPolicy
from vllm_gaudi_ucm.vllm_api.blocks import blocks_to_be_freed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm_gaudi_ucm.block_policies.policy import Turn
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.protocol.memory_orders import BlockMoves, MemoryTotals
    from vllm_gaudi_ucm.vllm_api.scheduling import FreeKVCacheBlockQueue, KVCacheBlock, KVCacheManager, Scheduler
    from vllm_gaudi_ucm.vllm_api.steps import SchedulerOutput


class CompactionPolicy(BlockPolicy):
    """Gives blocks in the order of a queue that knows runs, and moves blocks before a step.

    totals: counts the moves.
    """

    name = "compaction"
    compaction: Compaction
    runs: FreeRuns

    def __init__(self, totals: MemoryTotals) -> None:
        self._totals = totals
        self._moves: list[BlockMoves] = []

    def attach(
        self,
        manager: KVCacheManager,
        is_of_use: Callable[[KVCacheBlock], bool],
        reused: Callable[[Iterable[KVCacheBlock]], None],
    ) -> FreeKVCacheBlockQueue:
        pool = manager.block_pool
        self.runs = FreeRuns.over(pool.blocks, pool.free_block_queue, is_of_use, reused)
        self.compaction = Compaction(pool, self.runs, manager.evict_blocks, self._totals)
        return self.runs

    def reserve(self, turn: Turn) -> bool:
        """Tells the queue whose blocks come next: for the rest of the request's prompt, or for its next token."""
        held = turn.held
        needed = -(-turn.request.num_tokens // turn.block_size)
        self.runs.expect(held[-1].block_id if held else NO_BLOCK, needed - len(held))
        return True

    def reset(self) -> None:
        self.runs.sort_anew()

    def before_step(self, scheduler: Scheduler) -> None:
        """Plans the moves. Workers run steps in order, so the blocks that move here have been written by then, even in
        a pipeline.
        """
        is_quiet = not scheduler.waiting and not any(request.is_prefill_chunk for request in scheduler.running)
        self._moves = self.compaction.step(is_quiet, blocks_to_be_freed(scheduler))

    def orders(self, scheduler_output: SchedulerOutput) -> dict[str, Any]:
        self._totals.count_density(self.compaction.density)
        return {"moves": self._moves}


def make_compaction(scheduler: Scheduler, config: UcmConfig, totals: MemoryTotals) -> CompactionPolicy:
    return CompactionPolicy(totals)
