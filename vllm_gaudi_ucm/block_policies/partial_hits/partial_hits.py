"""Prefix caching to the token: after the full blocks that vLLM finds, a request gets a copy of part of one more block.

vLLM copies a block that a request would write to while others refer to it, if the prefix that the cache has found ends
inside the block (`SingleTypeKVCacheManager._apply_cow`). With one kind of layer vLLM never looks for such a block; this
module finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.block_policies.partial_hits.partial_blocks import PartialBlocks
from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock
    from vllm_gaudi_ucm.vllm_api.steps import Request

Tables = Sequence[Sequence["KVCacheBlock"]]
"""Blocks of a request in each KV-cache group."""
WORTH_A_STEP = 8
"""The fewest tokens that a request must save to wait for a block that is filled by the step being scheduled."""


@dataclass
class _Followed:
    """The blocks of a live request. next: the logical block to follow next. blocks: those before it, of all groups."""

    next: int
    blocks: list[KVCacheBlock]


class PartialHits:
    """Finds parts of blocks for requests that begin, and remembers the contents of the blocks of all requests.

    Args:
        block_size: tokens per block.
        root: returns what a request's first block shares only with requests of the same kind, in addition to its
            tokens.
        waits: whether a request may wait a step for a block that is about to be filled.
        totals: counts copies and waits.
        groups: number of KV-cache groups.
    """

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
        # requests that wait for a block that the step being scheduled fills, and whether others may take their places
        self._passed_over: list[Request] = []
        self._has_seat = True
        # blocks that the step being scheduled copies to: they are empty until then
        self._targets: set[int] = set()

    def begin_step(self) -> None:
        """Called when a step is about to be scheduled; all copies of earlier steps precede its own."""
        self._targets.clear()
        self._passed_over.clear()
        self._has_seat = True

    @property
    def passed_over(self) -> Sequence[Request]:
        """Returns the requests that begin in the next step, although others behind them begin in this one."""
        return self._passed_over

    def holds(self, block: KVCacheBlock) -> bool:
        """Returns whether a block is worth keeping for future requests."""
        return self._blocks.holds(block)

    def extend(self, request: Request, hits: KVCacheBlocks, num_tokens: int, longest: int) -> tuple[KVCacheBlocks, int]:
        """Extends full blocks that were found by the block to copy from; returns the blocks and the number of tokens.

        longest: the most tokens that may be found. The last token of a request is computed for its logits.
        """
        self._waiting = None
        if not _can_share(request):
            return hits, num_tokens
        full = hits.blocks[0]
        before = request.block_hashes[len(full) - 1] if full else self._root(request)
        end = min(num_tokens + self._block_size, longest)
        wanted = request.all_token_ids[num_tokens:end]
        parts = [self._blocks.find(before, wanted, self._targets, group) for group in range(len(hits.blocks))]
        # every group must have it
        found = min(0 if match is None else match.tokens for match, _ in parts)
        coming = min(coming for _, coming in parts)
        if self._may_wait and coming - found >= WORTH_A_STEP:
            self._waiting = request.request_id
        if not found:
            return hits, num_tokens
        tails = [[match.block] for match, _ in parts if match is not None]
        extended = tuple([*blocks, *tail] for blocks, tail in zip(hits.blocks, tails, strict=True))
        return KVCacheBlocks(extended), num_tokens + found

    def needs_nothing(self) -> None:
        """Called when the request that was just looked up gets more than a copy would give it."""
        self._waiting = None

    def passes_over(self, request: Request, seats: int) -> bool:
        """Returns True if the request that was just looked up waits for the next step, and those behind it may begin
        first.

        seats: number of requests that may begin in this step or in the next one. A request that waits keeps one seat,
        which also limits how many are passed over.
        """
        kept = len(self._passed_over)
        self._has_seat = kept < seats
        if self._waiting != request.request_id or kept + 1 >= seats:
            return False
        self._passed_over.append(request)
        self._totals.copy_waits += 1
        return True

    def holds_up(self, request: Request) -> bool:
        """Returns True if a request and all behind it begin in the next step at the earliest."""
        waits = self._waiting == request.request_id
        self._totals.copy_waits += waits
        return waits or not self._has_seat

    def kept_blocks(self) -> int:
        """Returns how many blocks of all groups the requests that were passed over may need for their tokens."""
        return sum(-(-one.num_tokens // self._block_size) for one in self._passed_over) * self._groups

    def began(self, tables: Tables, hit_tokens: int) -> None:
        """Counts copies when a request has its first blocks; hit_tokens: tokens that were found for it."""
        number, tokens = divmod(hit_tokens, self._block_size)
        if tokens:
            self._targets.update(id(blocks[number]) for blocks in tables)
            self._totals.copies += len(tables)
            self._totals.copied_tokens += tokens

    def allotted(self, request: Request, tables: Tables, others: int) -> None:
        """Follows a request's blocks after scheduling. others: its first blocks that others computed or a connector
        loads.
        """
        if not _can_share(request):
            return
        followed = self._followed.get(request.request_id)
        if followed is None:
            followed = self._followed[request.request_id] = _Followed(others, [])
        first, root = followed.next, self._root(request)
        for group, blocks in enumerate(tables):
            # the same number in each group
            followed.next = self._blocks.follow(request, root, blocks, first, group)
            followed.blocks += blocks[first : followed.next]

    def leaves(self, request: Request) -> None:
        """Called when a request is about to lose its blocks; windows have freed some already, which others may own by
        now.
        """
        followed = self._followed.pop(request.request_id, None)
        if followed is not None:
            self._blocks.leave(request, followed.blocks)

    def reused(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Forgets blocks that are about to be overwritten or were found to be wrong."""
        for block in blocks:
            self._blocks.forget(block)

    def reset(self) -> None:
        """Forgets all blocks, because the computed contents are no longer valid."""
        self._blocks.clear()


def _can_share(request: Request) -> bool:
    """Returns whether tokens describe all of a prompt's content and do not change."""
    return request.prompt_embeds is None and not request.mm_features and not request.resumable
