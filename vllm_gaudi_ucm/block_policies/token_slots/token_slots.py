"""Gives requests strips of slots, one slot for each token, at static shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_gaudi_ucm.block_policies.policy import BlockPolicy, Hit, Turn
from vllm_gaudi_ucm.block_policies.token_slots.free_strips import FreeStrips
from vllm_gaudi_ucm.graphs.shapes.limits import most_ranges, strip_size
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.vllm_api.cache_options import tile_of_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
    from vllm_gaudi_ucm.vllm_api.scheduling import FreeKVCacheBlockQueue, KVCacheBlock, KVCacheManager, Scheduler
    from vllm_gaudi_ucm.vllm_api.steps import Request

logger = plugin_logger(__name__)


class StripSizes:
    """The sizes that a server's buckets hold.

    Args:
        tile: slots that attention reads as a block.
        strip: slots of a strip; tiles are made of strips.
        max_model_len: the most tokens of a request.
        most_ranges: the most ranges of a context.
    """

    def __init__(self, tile: int, strip: int, max_model_len: int, most_ranges: int) -> None:
        self.tile, self.strip = tile, strip
        self.max_model_len, self.most_ranges = max_model_len, most_ranges

    def longest_hit(self, slots: Sequence[KVCacheBlock]) -> int:
        """Returns how many of the first `slots` a request may share, so that its context has at most `most_ranges`
        ranges, however it continues: each strip of its own is one more.
        """
        ids = np.fromiter((block.block_id for block in slots), np.int64, len(slots))
        begins = np.diff(ids, prepend=-1) != 1
        begins |= (ids - 1) % self.tile == 0
        own = -(-(self.max_model_len - np.arange(1, len(ids) + 1)) // self.strip) + 1
        fits = np.flatnonzero(begins.cumsum() + own <= self.most_ranges)
        return int(fits[-1]) + 1 if len(fits) else 0


class TokenSlots(BlockPolicy):
    """Gives strips of slots to requests, and limits how scattered a prefix that others have computed may be.

    A request that finds too few empty strips waits, or preempts others, as if there were too few blocks. If no other
    request has any slot, the slots that it has found in the prefix cache are scattered so that too few strips remain:
    then it computes those tokens again, and everything fits.
    """

    name = "slots for tokens"
    _free: FreeStrips

    def __init__(self, sizes: StripSizes) -> None:
        self._sizes = sizes
        self._without_hits: set[str] = set()

    def attach(
        self,
        manager: KVCacheManager,
        is_of_use: Callable[[KVCacheBlock], bool],
        reused: Callable[[Iterable[KVCacheBlock]], None],
    ) -> FreeKVCacheBlockQueue:
        pool = manager.block_pool
        slots = pool.free_block_queue.popleft_n(pool.free_block_queue.num_free_blocks)
        self._free = FreeStrips(pool.blocks, slots, self._sizes.strip, manager.evict_blocks)
        return self._free

    def find(self, manager: KVCacheManager, request: Request, hit: Hit) -> Hit:
        recomputes = request.request_id in self._without_hits
        tokens = 0 if recomputes else self._sizes.longest_hit(hit.full.blocks[0])
        full = manager.truncate_computed_blocks(hit.full, tokens)
        return hit._replace(blocks=full, full=full, tokens=tokens)

    def reserve(self, turn: Turn) -> bool:
        request, held = turn.request, turn.held
        last = held[-1].block_id if held else 0
        # a step without drafts does not need the slots of rejected drafts
        count = max(0, min(turn.num_tokens, self._sizes.max_model_len) - len(held))
        is_alone = turn.begins and self._free.num_free_blocks == self._free.num_slots
        expected = request.num_tokens - len(held)
        is_there = self._free.reserve(request.request_id, last, count, expected, held if turn.begins else ())
        if not is_there and is_alone:
            self._without_hits.add(request.request_id)
        return is_there

    def given(self, turn: Turn) -> None:
        self._without_hits.discard(turn.request.request_id)

    def not_given(self, turn: Turn) -> None:
        held = () if turn.begins else turn.tables[0]
        self._free.cancel(turn.request.request_id, held[-1].block_id if held else 0)

    def leaves(self, request: Request) -> None:
        self._free.release(request.request_id)
        self._without_hits.discard(request.request_id)

    def reset(self) -> None:
        self._free.forget_cached()


def make_token_slots(scheduler: Scheduler, config: UcmConfig, totals: MemoryTotals) -> TokenSlots | None:
    """Makes the policy; returns None at true shapes, which have room for any number of ranges."""
    tile, longest = tile_of_slots(scheduler.vllm_config), scheduler.max_model_len
    if tile is None:
        return None
    strip = strip_size(tile)
    logger.info("Slots for tokens: a request gets %d that follow each other at once.", strip)
    return TokenSlots(StripSizes(tile, strip, longest, most_ranges(longest, strip)))
