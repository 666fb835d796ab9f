"""Block tables and free blocks of vLLM's scheduler, as far as memory mode changes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.vllm_api.blocks import forget_cached_blocks, kv_block_lists

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock, KVCacheManager
    from vllm_gaudi_ucm.vllm_api.steps import Request


class RequestBlocks:
    """As vLLM's sliding window does it: a block that leaves is replaced by the null block and freed.

    A block is freed by its count of owners, so one that another request or the prefix cache still uses stays theirs.
    """

    def __init__(self, manager: KVCacheManager, block_size: int) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._lists = kv_block_lists(manager)
        self._size = block_size
        # hashes of a finer grain are no hashes of blocks
        self._caching = manager.enable_caching and self._pool.hash_block_size == block_size

    @property
    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks)

    def table(self, request_id: str) -> list[KVCacheBlock]:
        """The request's blocks, the null block where one is away; empty for a request that has none."""
        return self._lists.get(request_id, [])

    def is_owned_alone(self, request_id: str, number: int) -> bool:
        """Whether releasing the block would free it."""
        block = self._lists[request_id][number]
        return not block.is_null and block.ref_cnt == 1

    def release(self, request_id: str, number: int) -> None:
        """Puts the null block in place of logical block `number`, and frees that."""
        table = self._lists[request_id]
        block, table[number] = table[number], self._pool.null_block
        self._pool.free_blocks([block])

    def put(self, request_id: str, number: int, block: KVCacheBlock) -> None:
        """Gives logical block `number` a physical block that the caller owns."""
        self._lists[request_id][number] = block

    def take(self) -> KVCacheBlock:
        """A free block, which is the caller's now. Raises ValueError where there is none."""
        (block,) = self._pool.get_new_blocks(1)
        return block

    def blocks_to_write(self, computed: Iterable[tuple[str, int]]) -> set[int]:
        """Physical blocks of requests from their first token on that is not computed yet.

        computed: id and computed tokens of each.
        """
        tables = ((self.table(request_id), tokens // self._size) for request_id, tokens in computed)
        return {block.block_id for table, first in tables for block in table[first:]}

    def take_cached(self, request: Request, number: int, unwritten: Set[int] = frozenset()) -> KVCacheBlock | None:
        """The block that has the content of logical block `number`, if the prefix cache still has it.

        unwritten: physical blocks that do not have their content yet, although the prefix cache says so.
        """
        if not self._caching or number >= len(request.block_hashes):
            return None
        found = self._pool.get_cached_block(request.block_hashes[number], [0])
        if found is None or found[0].block_id in unwritten:
            return None
        self._pool.touch(found)
        return found[0]

    def forget_cached(self, request_id: str, first: int) -> None:
        """The prefix cache has logical blocks `first` and following no more, until the request's next step."""
        forget_cached_blocks(self._manager, request_id, first)

    def free_all(self, request: Request) -> None:
        """Frees what the request has: its table is empty then."""
        self._manager.free(request)

    def give_back(self, blocks: list[KVCacheBlock]) -> None:
        """Frees blocks that the caller owns."""
        self._pool.free_blocks(blocks)


def dispensable_blocks(
    full: int, missing: Sequence[int], block_size: int, resident_ratio: float, options: BlockOptions
) -> list[int]:
    """The blocks that may stay where they are, least wanted first; empty where the step is dense.

    Sinks and local window are always wanted, and of the others as many as memory mode would keep.

    Args:
        full: blocks of the context; up to a block of tokens more is to be computed, maybe in several steps.
        missing: those that are not on the device, most wanted first.
        block_size: tokens per block.
        resident_ratio: part of the full blocks that may be on the device.
        options: of the method.
    """
    # windows only move away from what is missing as tokens are added, and by the block that a full tail adds to the
    # budget there is one more on the device to choose from
    budget = block_budget(full * block_size + 1, block_size, options)
    if budget is None:
        return []
    between = [number for number in missing if budget.sink_blocks <= number < budget.window_start]
    live = full - budget.num_candidates
    room = max(budget.num_selected, math.ceil(resident_ratio * full - 1e-9) - live)
    here = budget.num_candidates - len(between)
    return between[max(0, room - here) :][::-1]


@dataclass
class Life:
    """A request from its beginning, or from its resumption, to its end or preemption.

    number: which life it is; never used again. rows: of the blocks that have a copy, or of which one is being made.
    saving, saved: blocks of which a copy is being made, and is there. away: blocks that are not in the block table.
    loading: those among them on their way back, and the physical blocks that wait for them; no table has these yet.
    lost: those among them whose copy could not be read. stored: those among them whose copy is the connector's record,
    and its key. leaving, coming: what the last scores ask for.
    scores: decayed, by logical block. idle_steps, next_scoring: sparse steps since the last scores, and at which the
    next are asked for. stays: too much was missed, and every block comes back. is_guess: what is on the device was
    chosen without a query, and nothing was scored yet.
    """

    request_id: str
    number: int
    rows: dict[int, int] = field(default_factory=dict)
    saving: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)
    away: set[int] = field(default_factory=set)
    loading: dict[int, KVCacheBlock] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    stored: dict[int, bytes] = field(default_factory=dict)
    leaving: list[int] = field(default_factory=list)
    coming: list[int] = field(default_factory=list)
    scores: NDArray[np.float64] | None = None
    idle_steps: int = 0
    next_scoring: int = 1
    stays: bool = False
    is_guess: bool = False

    def check_integrity(self) -> None:
        """Conservation: every copy has a row; what is away has a copy; what is on its way back, or in the connector's
        store only, is away."""
        broken = []
        if set(self.rows) != self.saving | self.saved or self.saving & self.saved:
            broken.append(f"rows {sorted(self.rows)}, saving {sorted(self.saving)}, saved {sorted(self.saved)}")
        if not self.away <= self.saved:
            broken.append(f"away {sorted(self.away)} without a copy, saved {sorted(self.saved)}")
        if not (set(self.loading) | self.lost) <= self.away:
            broken.append(f"loading {sorted(self.loading)} or lost {sorted(self.lost)}, away {sorted(self.away)}")
        if not set(self.stored) <= self.away:
            broken.append(f"stored {sorted(self.stored)}, away {sorted(self.away)}")
        if broken:
            raise AssertionError(f"memory mode of request {self.request_id!r}: {'; '.join(broken)}")
