"""Compaction moves blocks in use down, so that the blocks that requests read are the first of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.block_policies.compaction.free_runs import NO_BLOCK, FreeRuns
from vllm_gaudi_ucm.block_policies.policy import BlockPolicy, Turn
from vllm_gaudi_ucm.vllm_api.blocks import blocks_to_be_freed, exchange_block_ids

if TYPE_CHECKING:
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.protocol.memory_orders import BlockMoves, MemoryTotals
    from vllm_gaudi_ucm.vllm_api.scheduling import (
        BlockPool,
        FreeKVCacheBlockQueue,
        KVCacheBlock,
        KVCacheManager,
        Scheduler,
    )
    from vllm_gaudi_ucm.vllm_api.steps import SchedulerOutput

GOAL = 0.9
"""The least fraction of blocks in use among the blocks up to the last one in use, including the null block."""
QUIET_GOAL = 0.95
"""The same for a step that computes no prompt: what moves in such a step need not move in a step with prompts."""
MOST_IN_STEP = 0.01
"""The most copies in a step, as a fraction of the KV cache's blocks."""


class Compaction(BlockPolicy):
    """Gives blocks in the order of a queue that knows runs, plans which blocks move before a step, and updates vLLM's
    tables.

    A block that moves takes the place of an empty block. If there is no empty block below the goal, it takes the place
    of a block in the prefix cache, which moves up first: the only cached blocks that are lost are those that vLLM would
    give away next.
    """

    name = "compaction"
    runs: FreeRuns
    _pool: BlockPool
    _evict: Callable[[set[int]], None]

    def __init__(self, totals: MemoryTotals) -> None:
        self._totals = totals
        self._moves: list[BlockMoves] = []

    def attach(
        self,
        manager: KVCacheManager,
        is_of_use: Callable[[KVCacheBlock], bool],
        reused: Callable[[Iterable[KVCacheBlock]], None],
    ) -> FreeKVCacheBlockQueue:
        self._pool, self._evict = manager.block_pool, manager.evict_blocks
        self._most = max(1, int(MOST_IN_STEP * self._pool.num_gpu_blocks))
        self.runs = FreeRuns.over(self._pool.blocks, self._pool.free_block_queue, is_of_use, reused)
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
        """Plans the moves. Workers run steps in order: what moves here has been written by then, in pipelines, too."""
        is_quiet = not scheduler.waiting and not any(request.is_prefill_chunk for request in scheduler.running)
        self._moves = self.step(is_quiet, blocks_to_be_freed(scheduler))

    def orders(self, scheduler_output: SchedulerOutput) -> dict[str, Any]:
        self._totals.count_density(self.density)
        return {"moves": self._moves}

    @property
    def density(self) -> float:
        """Returns blocks in use / (highest id in use + 1)."""
        return self._in_use / (self.runs.highest_in_use + 1)

    def step(self, is_quiet: bool, pinned: Collection[int] = ()) -> list[BlockMoves]:
        """Returns the copies that the worker has to make before the step that is about to be scheduled; empty if all
        blocks stay.

        is_quiet: the step computes no prompt. pinned: ids of blocks in use that must stay.
        """
        end = int(self._in_use / (QUIET_GOAL if is_quiet else GOAL))
        sources = self.runs.in_use_from(end, self._most, pinned)
        if not sources:
            return []
        ups, targets = self._make_room(len(sources), end)
        downs = self._move_down(sources[len(sources) - len(targets) :], targets)
        self._totals.moves += len(ups) + len(downs)
        return [moves for moves in (ups, downs) if moves]

    @property
    def _in_use(self) -> int:
        return self._pool.num_gpu_blocks - self.runs.num_free_blocks

    def _make_room(self, count: int, end: int) -> tuple[BlockMoves, list[KVCacheBlock]]:
        """Returns at most `count` empty blocks below `end`, no longer free, and the copies that come first."""
        ups: BlockMoves = []
        targets = [self._take(number) for number in self.runs.lowest_empty(count, end)]
        # at least one of them, however small the KV cache is
        while len(targets) < count and (not targets or len(targets) + len(ups) + 2 <= self._most):
            spare = self._spare()
            if spare.block_id >= end:
                ups.append(self._move_up(self._pool.blocks[self.runs.lowest_kept(end)], spare))
            targets.append(spare)
        return ups, targets

    def _take(self, number: int) -> KVCacheBlock:
        block = self._pool.blocks[number]
        self.runs.remove(block)
        return block

    def _spare(self) -> KVCacheBlock:
        """Returns an empty block, or empties the block that would be given away next; it is no longer free."""
        block = self.runs.next_given_away
        self._evict({block.block_id})
        self.runs.remove(block)
        return block

    def _move_up(self, kept: KVCacheBlock, spare: KVCacheBlock) -> tuple[int, int]:
        """Gives a free block of the prefix cache the id of an empty block; it keeps its place in the queue."""
        before = kept.block_id
        assert before != NO_BLOCK, "as many blocks are free below the end as are in use behind it"
        exchange_block_ids(self._pool, kept, spare)
        self.runs.renumbered(kept, before)
        return before, kept.block_id

    def _move_down(self, sources: list[int], targets: list[KVCacheBlock]) -> BlockMoves:
        """Gives the blocks with ids `sources` the ids of `targets`, both in order, so that runs stay runs."""
        moves: BlockMoves = []
        targets.sort(key=lambda block: block.block_id)
        for source, target in zip(sources, targets, strict=True):
            moves.append((source, target.block_id))
            exchange_block_ids(self._pool, self._pool.blocks[source], target)
        self.runs.prepend_n(targets)
        return moves


def make_compaction(scheduler: Scheduler, config: UcmConfig, totals: MemoryTotals) -> Compaction:
    return Compaction(totals)
