"""Prefix caching to the token: after the full blocks that vLLM finds, a request gets a copy of part of one more block.

vLLM copies a block that a request would write to while others refer to it, if the prefix that the cache has found ends
inside the block (`SingleTypeKVCacheManager._apply_cow`). With one kind of layer vLLM never looks for such a block; this
module finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.block_policies.partial_hits.partial_blocks import PartialBlocks
from vllm_gaudi_ucm.block_policies.policy import BlockPolicy, Hit, Turn
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.vllm_api.blocks import is_isolated
from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock, KVCacheBlocks, KVCacheManager, Scheduler

if TYPE_CHECKING:
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
    from vllm_gaudi_ucm.vllm_api.steps import Request

logger = plugin_logger(__name__)

WORTH_A_STEP = 8
"""The fewest tokens that a request must save to wait for a block that is filled by the step being scheduled."""


@dataclass
class _Followed:
    """The blocks of a live request. next: the logical block to follow next. blocks: those before it, of all groups."""

    next: int
    blocks: list[KVCacheBlock]


class PartialHits(BlockPolicy):
    """Finds parts of blocks for requests that begin, and remembers the contents of the blocks of all requests.

    Args:
        root: returns what a request's first block shares only with requests of the same kind, in addition to its
            tokens.
        waits: whether a request may wait a step for a block that is about to be filled.
    """

    name = "partial hits"

    def __init__(
        self,
        block_size: int,
        root: Callable[[Request], Hashable],
        waits: bool,
        totals: MemoryTotals,
        groups: int = 1,
    ) -> None:
        self._block_size = block_size
        self._groups = groups
        self._root = root
        self._may_wait = waits
        self._totals = totals
        self._blocks = PartialBlocks(block_size)
        self._followed: dict[str, _Followed] = {}
        self._waiting: str | None = None
        self._tokens = 0
        # requests that wait for a block that the step being scheduled fills, and whether others may take their places
        self._passed_over: list[Request] = []
        self._has_seat = True
        # blocks that the step being scheduled copies to: they are empty until then
        self._targets: set[int] = set()

    def begin_step(self) -> None:
        # all copies of earlier steps precede the copies of the next step
        self._targets.clear()
        self._passed_over.clear()
        self._has_seat = True

    @property
    def ahead(self) -> Sequence[Request]:
        return self._passed_over

    def holds(self, block: KVCacheBlock) -> bool:
        return self._blocks.holds(block)

    def find(self, manager: KVCacheManager, request: Request, hit: Hit) -> Hit:
        """Extends the full blocks that were found by the block to copy from."""
        self._waiting = None
        if manager.prefix_cache_lookup_enabled(request) and _can_share(request) and self._has_room(manager, request):
            hit = self._extended(request, hit)
        self._tokens = hit.tokens
        return hit

    def _has_room(self, manager: KVCacheManager, request: Request) -> bool:
        """Returns whether the block to copy from has room, too; otherwise the request would never begin."""
        blocks = -(-(request.num_tokens + 1) // self._block_size) + 1
        return bool(blocks * self._groups < manager.block_pool.num_gpu_blocks)

    def _extended(self, request: Request, hit: Hit) -> Hit:
        hits, num_tokens = hit.full, hit.tokens
        full = hits.blocks[0]
        before = request.block_hashes[len(full) - 1] if full else self._root(request)
        end = min(num_tokens + self._block_size, hit.longest)
        wanted = request.all_token_ids[num_tokens:end]
        parts = [self._blocks.find(before, wanted, self._targets, group) for group in range(len(hits.blocks))]
        # every group must have it
        found = min(0 if match is None else match.tokens for match, _ in parts)
        coming = min(coming for _, coming in parts)
        if self._may_wait and coming - found >= WORTH_A_STEP:
            self._waiting = request.request_id
        if not found:
            return hit._replace(blocks=hits)
        tails = [[match.block] for match, _ in parts if match is not None]
        extended = tuple([*blocks, *tail] for blocks, tail in zip(hits.blocks, tails, strict=True))
        return hit._replace(blocks=KVCacheBlocks(extended), tokens=num_tokens + found)

    def found(self, tokens: int) -> None:
        # another policy brings more than a copy would
        if tokens != self._tokens:
            self._waiting = None

    def passes_over(self, request: Request, seats: int) -> bool:
        """Returns True if the request just looked up waits. It keeps one of the `seats`, which bounds their number."""
        kept = len(self._passed_over)
        self._has_seat = kept < seats
        if self._waiting != request.request_id or kept + 1 >= seats:
            return False
        self._passed_over.append(request)
        self._totals.copy_waits += 1
        return True

    def may_begin(self, turn: Turn) -> bool:
        waits = self._waiting == turn.request.request_id
        self._totals.copy_waits += waits
        return self._has_seat and not waits

    def kept_blocks(self) -> int:
        return sum(-(-one.num_tokens // self._block_size) for one in self._passed_over) * self._groups

    def given(self, turn: Turn) -> None:
        """Counts the copies of a request that begins, and follows its blocks."""
        tables, request = turn.tables, turn.request
        number, tokens = divmod(turn.found, self._block_size)
        if turn.begins and tokens:
            self._targets.update(id(blocks[number]) for blocks in tables)
            self._totals.copies += len(tables)
            self._totals.copied_tokens += tokens
        # a load may still fail
        if turn.is_cached_later or not _can_share(request):
            return
        # the first blocks are computed by others, or a connector loads them
        others = -(-(turn.found + turn.loaded) // self._block_size) if turn.loaded else number
        followed = self._followed.get(request.request_id)
        if followed is None:
            followed = self._followed[request.request_id] = _Followed(others, [])
        first, root = followed.next, self._root(request)
        for group, blocks in enumerate(tables):
            # the same number in each group
            followed.next = self._blocks.follow(request, root, blocks, first, group)
            followed.blocks += blocks[first : followed.next]

    def leaves(self, request: Request) -> None:
        # windows have freed some of its blocks already, which others may own by now
        followed = self._followed.pop(request.request_id, None)
        if followed is not None:
            self._blocks.leave(request, followed.blocks)

    def reused(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self._blocks.forget(block)

    def reset(self) -> None:
        self._blocks.clear()


def _can_share(request: Request) -> bool:
    """Returns whether tokens describe all of a prompt's content and do not change."""
    return request.prompt_embeds is None and not request.mm_features and not request.resumable


def make_partial_hits(scheduler: Scheduler, config: UcmConfig, totals: MemoryTotals) -> PartialHits:
    """Makes the policy. Requests share as in the prefix cache: separated by salt, adapter, and sparse or dense."""
    has_method = config.ucm_sparse_method is not None

    def root(request: Request) -> Hashable:
        is_sparse = has_method and not is_isolated(request)
        adapter = request.lora_request
        named = None if adapter is None else (adapter.lora_name, adapter.lora_path)
        return is_sparse, request.cache_salt, named

    logger.info("Partial hits: requests take the part of a block that agrees with their prompt as a copy.")
    # a connector may find more than the block that a request would wait for
    groups = len(scheduler.kv_cache_config.kv_cache_groups)
    return PartialHits(scheduler.block_size, root, scheduler.connector is None, totals, groups)
