"""Gives requests copies of parts of blocks that others have computed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.block_policies.partial_hits.partial_hits import PartialHits
from vllm_gaudi_ucm.block_policies.policy import BlockPolicy
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.vllm_api.blocks import is_isolated

if TYPE_CHECKING:
    from vllm_gaudi_ucm.block_policies.policy import Hit, Turn
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock, KVCacheManager, Scheduler
    from vllm_gaudi_ucm.vllm_api.steps import Request

logger = plugin_logger(__name__)


class PartialHitsPolicy(BlockPolicy):
    """Extends a hit of the prefix cache by a part of one more block.

    partial: what is known of the blocks of all requests.
    """

    name = "partial hits"

    def __init__(self, partial: PartialHits) -> None:
        self.partial = partial
        self._tokens = 0

    def holds(self, block: KVCacheBlock) -> bool:
        return self.partial.holds(block)

    def reused(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.partial.reused(blocks)

    def begin_step(self) -> None:
        self.partial.begin_step()

    def find(self, manager: KVCacheManager, request: Request, hit: Hit) -> Hit:
        if manager.prefix_cache_lookup_enabled(request):
            blocks, tokens = self.partial.extend(request, hit.full, hit.tokens, hit.longest)
            hit = hit._replace(blocks=blocks, tokens=tokens)
        self._tokens = hit.tokens
        return hit

    def found(self, tokens: int) -> None:
        if tokens != self._tokens:
            self.partial.needs_nothing()

    def passes_over(self, request: Request, seats: int) -> bool:
        return self.partial.passes_over(request, seats)

    @property
    def ahead(self) -> Sequence[Request]:
        return self.partial.passed_over

    def kept_blocks(self) -> int:
        return self.partial.kept_blocks()

    def may_begin(self, turn: Turn) -> bool:
        return not self.partial.holds_up(turn.request)

    def given(self, turn: Turn) -> None:
        tables = turn.tables
        if turn.begins:
            self.partial.began(tables, turn.found)
        # a load may still fail
        if not turn.is_cached_later:
            others = turn.found // turn.block_size
            if turn.loaded:
                others = -(-(turn.found + turn.loaded) // turn.block_size)
            self.partial.allotted(turn.request, tables, others)

    def leaves(self, request: Request) -> None:
        self.partial.leaves(request)

    def reset(self) -> None:
        self.partial.reset()


def make_partial_hits(scheduler: Scheduler, config: UcmConfig, totals: MemoryTotals) -> PartialHitsPolicy:
    """Makes the policy. Requests share as in the prefix cache: separated by salt, adapter, and sparse or dense
    attention.
    """
    has_method = config.ucm_sparse_method is not None

    def root(request: Request) -> Hashable:
        is_sparse = has_method and not is_isolated(request)
        adapter = request.lora_request
        named = None if adapter is None else (adapter.lora_name, adapter.lora_path)
        return is_sparse, request.cache_salt, named

    logger.info("Partial hits: requests take the part of a block that agrees with their prompt as a copy.")
    # a connector may find more than the block that a request would wait for
    groups = len(scheduler.kv_cache_config.kv_cache_groups)
    return PartialHitsPolicy(PartialHits(scheduler.block_size, root, scheduler.connector is None, totals, groups))
