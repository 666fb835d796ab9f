"""Prefix caching to the token: after the full blocks that vLLM finds, a part of one more block, as a copy.

vLLM copies a block that a request would write to while others refer to it, if what the prefix cache has found ends
inside of the block (`SingleTypeKVCacheManager._apply_cow`). With one kind of layer it never looks for such a block;
here it is found.
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
"""Tokens that a request saves at least by waiting for a block that the step fills which is being scheduled."""


@dataclass
class _Followed:
    """Of a live request. next: the logical block to follow next. blocks: those before it, of all groups."""

    next: int
    blocks: list[KVCacheBlock]


class PartialHits:
    """Finds parts of blocks for requests that begin, and remembers what is in the blocks of all.

    Args:
        block_size: tokens per block.
        root: what a request's first block shares with others of the same kind alone, beside its tokens.
        waits: whether a request may wait a step for a block that is about to be filled.
        totals: takes what happens.
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
        # those that wait for what the step fills which is being scheduled, and whether others may take their places
        self._passed_over: list[Request] = []
        self._has_seat = True
        # blocks that the step which is being scheduled copies to: nothing is in them yet
        self._targets: set[int] = set()

    def begin_step(self) -> None:
        """A step is about to be scheduled; all copies of earlier ones come before its own."""
        self._targets.clear()
        self._passed_over.clear()
        self._has_seat = True

    @property
    def passed_over(self) -> Sequence[Request]:
        """Requests that begin in the next step, although others behind them begin in this one."""
        return self._passed_over

    def holds(self, block: KVCacheBlock) -> bool:
        """Whether it is worth keeping for requests to come."""
        return self._blocks.holds(block)

    def extend(self, request: Request, hits: KVCacheBlocks, num_tokens: int, longest: int) -> tuple[KVCacheBlocks, int]:
        """Full blocks that were found, and their tokens -> the same with the block to copy from, and all tokens.

        longest: the most tokens that may be found. The last one of a request is computed for its logits.
        """
        self._waiting = None
        if not _can_share(request):
            return hits, num_tokens
        full = hits.blocks[0]
        before = request.block_hashes[len(full) - 1] if full else self._root(request)
        end = min(num_tokens + self._block_size, longest)
        wanted = request.all_token_ids[num_tokens:end]
        parts = [self._blocks.find(before, wanted, self._targets, group) for group in range(len(hits.blocks))]
        # every group has to have it
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
        """The request that was just looked up gets more than a copy would give it."""
        self._waiting = None

    def passes_over(self, request: Request, seats: int) -> bool:
        """True if a request that was just looked up waits for the next step, and those behind it may begin before it.

        seats: for requests that begin in this step or in the next one. A request that waits keeps one of them, which
        also bounds how many are passed over.
        """
        kept = len(self._passed_over)
        self._has_seat = kept < seats
        if self._waiting != request.request_id or kept + 1 >= seats:
            return False
        self._passed_over.append(request)
        self._totals.copy_waits += 1
        return True

    def holds_up(self, request: Request) -> bool:
        """True if a request and all behind it begin in the next step at the earliest."""
        waits = self._waiting == request.request_id
        self._totals.copy_waits += waits
        return waits or not self._has_seat

    def kept_blocks(self) -> int:
        """Blocks of all groups that requests passed over may need for what they have."""
        return sum(-(-one.num_tokens // self._block_size) for one in self._passed_over) * self._groups

    def began(self, tables: Tables, hit_tokens: int) -> None:
        """A request has its first blocks; hit_tokens: those that were found for it."""
        number, tokens = divmod(hit_tokens, self._block_size)
        if tokens:
            self._targets.update(id(blocks[number]) for blocks in tables)
            self._totals.copies += len(tables)
            self._totals.copied_tokens += tokens

    def allotted(self, request: Request, tables: Tables, others: int) -> None:
        """A step was allotted to a request. others: its first blocks that others computed, or a connector loads."""
        if not _can_share(request):
            return
        followed = self._followed.get(request.request_id)
        if followed is None:
            followed = self._followed[request.request_id] = _Followed(others, [])
        first, root = followed.next, self._root(request)
        for group, blocks in enumerate(tables):
            # as many in each group
            followed.next = self._blocks.follow(request, root, blocks, first, group)
            followed.blocks += blocks[first : followed.next]

    def leaves(self, request: Request) -> None:
        """A request is about to lose its blocks; windows have given some back already, which may be others' by now."""
        followed = self._followed.pop(request.request_id, None)
        if followed is not None:
            self._blocks.leave(request, followed.blocks)

    def reused(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Blocks that something else will be written to, or that were found to be wrong."""
        for block in blocks:
            self._blocks.forget(block)

    def reset(self) -> None:
        """Nothing that was computed is right any more."""
        self._blocks.clear()


def _can_share(request: Request) -> bool:
    """Tokens say all of a prompt's content, and stay what they are."""
    return request.prompt_embeds is None and not request.mm_features and not request.resumable
