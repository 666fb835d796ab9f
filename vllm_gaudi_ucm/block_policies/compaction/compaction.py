"""Compaction moves blocks in use down, so that the blocks that requests read are the first of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.block_policies.compaction.free_runs import NO_BLOCK
from vllm_gaudi_ucm.vllm_api.blocks import exchange_block_ids

if TYPE_CHECKING:
    from vllm_gaudi_ucm.block_policies.compaction.free_runs import FreeRuns
    from vllm_gaudi_ucm.protocol.memory_orders import BlockMoves, MemoryTotals
    from vllm_gaudi_ucm.vllm_api.scheduling import BlockPool, KVCacheBlock

GOAL = 0.9
"""The least fraction of blocks in use among the blocks up to the last one in use, including the null block."""
QUIET_GOAL = 0.95
"""The same for a step that computes no prompt: what moves in such a step need not move in a step with prompts."""
MOST_IN_STEP = 0.01
"""The most copies in a step, as a fraction of the KV cache's blocks."""


class Compaction:
    """Plans which blocks move before a step, and updates vLLM's tables.

    A block that moves takes the place of an empty block. If there is no empty block below the goal, it takes the place
    of a block in the prefix cache, which moves up first: the only cached blocks that are lost are those that vLLM would
    give away next.

    Args:
        pool: vLLM's block pool.
        free: the pool's queue of free blocks.
        evict: takes blocks, by id, out of the prefix cache, and forgets what is known of them.
        totals: counts the moves.
    """

    def __init__(
        self, pool: BlockPool, free: FreeRuns, evict: Callable[[set[int]], None], totals: MemoryTotals
    ) -> None:
        self._pool = pool
        self._free = free
        self._evict = evict
        self._totals = totals
        self._most = max(1, int(MOST_IN_STEP * pool.num_gpu_blocks))

    @property
    def density(self) -> float:
        """Returns blocks in use / (highest id in use + 1)."""
        return self._in_use / (self._free.highest_in_use + 1)

    def step(self, is_quiet: bool, pinned: Collection[int] = ()) -> list[BlockMoves]:
        """Returns the copies that the worker has to make before the step that is about to be scheduled; empty if all
        blocks stay.

        is_quiet: the step computes no prompt. pinned: ids of blocks in use that must stay.
        """
        end = int(self._in_use / (QUIET_GOAL if is_quiet else GOAL))
        sources = self._free.in_use_from(end, self._most, pinned)
        if not sources:
            return []
        ups, targets = self._make_room(len(sources), end)
        downs = self._move_down(sources[len(sources) - len(targets) :], targets)
        self._totals.moves += len(ups) + len(downs)
        return [moves for moves in (ups, downs) if moves]

    @property
    def _in_use(self) -> int:
        return self._pool.num_gpu_blocks - self._free.num_free_blocks

    def _make_room(self, count: int, end: int) -> tuple[BlockMoves, list[KVCacheBlock]]:
        """Returns at most `count` empty blocks below `end`, no longer free, and the copies that come first."""
        ups: BlockMoves = []
        targets = [self._take(number) for number in self._free.lowest_empty(count, end)]
        # at least one of them, however small the KV cache is
        while len(targets) < count and (not targets or len(targets) + len(ups) + 2 <= self._most):
            spare = self._spare()
            if spare.block_id >= end:
                ups.append(self._move_up(self._pool.blocks[self._free.lowest_kept(end)], spare))
            targets.append(spare)
        return ups, targets

    def _take(self, number: int) -> KVCacheBlock:
        block = self._pool.blocks[number]
        self._free.remove(block)
        return block

    def _spare(self) -> KVCacheBlock:
        """Returns an empty block, or empties the block that would be given away next; it is no longer free."""
        block = self._free.next_given_away
        self._evict({block.block_id})
        self._free.remove(block)
        return block

    def _move_up(self, kept: KVCacheBlock, spare: KVCacheBlock) -> tuple[int, int]:
        """Gives a free block of the prefix cache the id of an empty block; it keeps its place in the queue."""
        before = kept.block_id
        assert before != NO_BLOCK, "as many blocks are free below the end as are in use behind it"
        exchange_block_ids(self._pool, kept, spare)
        self._free.renumbered(kept, before)
        return before, kept.block_id

    def _move_down(self, sources: list[int], targets: list[KVCacheBlock]) -> BlockMoves:
        """Gives the blocks with ids `sources` the ids of `targets`, both in order, so that runs stay runs."""
        moves: BlockMoves = []
        targets.sort(key=lambda block: block.block_id)
        for source, target in zip(sources, targets, strict=True):
            moves.append((source, target.block_id))
            exchange_block_ids(self._pool, self._pool.blocks[source], target)
        self._free.prepend_n(targets)
        return moves
