"""Gives requests strips of slots, one slot for each token, at static shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.block_policies.policy import BlockPolicy
from vllm_gaudi_ucm.block_policies.token_slots.slot_strips import SlotStrips, StripSizes
from vllm_gaudi_ucm.graphs.shapes.limits import most_ranges, strip_size
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.vllm_api.cache_options import tile_of_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm_gaudi_ucm.block_policies.policy import Hit, Turn
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
    from vllm_gaudi_ucm.vllm_api.scheduling import FreeKVCacheBlockQueue, KVCacheBlock, KVCacheManager, Scheduler
    from vllm_gaudi_ucm.vllm_api.steps import Request

logger = plugin_logger(__name__)


class TokenSlots(BlockPolicy):
    """Gives strips of slots, and limits a prefix to the ranges that fit.

    sizes: the sizes of the server's buckets.
    """

    name = "slots for tokens"
    _strips: SlotStrips

    def __init__(self, sizes: StripSizes) -> None:
        self._sizes = sizes

    def attach(
        self,
        manager: KVCacheManager,
        is_of_use: Callable[[KVCacheBlock], bool],
        reused: Callable[[Iterable[KVCacheBlock]], None],
    ) -> FreeKVCacheBlockQueue:
        self._strips = SlotStrips(manager.block_pool, self._sizes, manager.evict_blocks)
        return self._strips.free

    def find(self, manager: KVCacheManager, request: Request, hit: Hit) -> Hit:
        tokens = self._strips.longest_hit(request, hit.full.blocks[0])
        full = manager.truncate_computed_blocks(hit.full, tokens)
        return hit._replace(blocks=full, full=full, tokens=tokens)

    def reserve(self, turn: Turn) -> bool:
        return self._strips.reserve(turn.request, turn.held, turn.num_tokens, turn.begins)

    def given(self, turn: Turn) -> None:
        self._strips.given(turn.request)

    def not_given(self, turn: Turn) -> None:
        self._strips.not_given(turn.request, () if turn.begins else turn.tables[0])

    def leaves(self, request: Request) -> None:
        self._strips.leaves(request)

    def reset(self) -> None:
        self._strips.free.forget_cached()


def make_token_slots(scheduler: Scheduler, config: UcmConfig, totals: MemoryTotals) -> TokenSlots | None:
    """Makes the policy; returns None at true shapes, which have room for any number of ranges."""
    tile, longest = tile_of_slots(scheduler.vllm_config), scheduler.max_model_len
    if tile is None:
        return None
    strip = strip_size(tile)
    logger.info("Slots for tokens: a request gets %d that follow each other at once.", strip)
    return TokenSlots(StripSizes(tile, strip, longest, most_ranges(longest, strip)))
