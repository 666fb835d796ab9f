"""The hooks of a policy of the KV cache's blocks, which the block manager and the scheduler call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.scheduling import (
        FreeKVCacheBlockQueue,
        KVCacheBlock,
        KVCacheBlocks,
        KVCacheManager,
        Scheduler,
    )
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, Request, SchedulerOutput


class Hit(NamedTuple):
    """The first tokens of a request that need not be computed.

    blocks: blocks of the prefix cache, and a block to copy from if `tokens` end inside it. full: the full blocks among
    them. tokens: more than `blocks` hold if the rest comes from elsewhere. longest: the most tokens to find.
    """

    blocks: KVCacheBlocks
    full: KVCacheBlocks
    tokens: int
    longest: int


class Turn(NamedTuple):
    """A request that asks for slots.

    Args:
        begins: whether it has no blocks yet.
        hits: blocks that were found for it.
        found: number of its first tokens that the prefix cache has.
        computed: `found` plus the tokens that a policy brings from elsewhere.
        num_tokens: number of its tokens that will have slots.
        loaded: tokens that a connector loads.
        is_cached_later: whether its new blocks enter the prefix cache later, because a load may fail.
        ahead: requests that begin in the next step, before this one if it waits.
    """

    manager: KVCacheManager
    request: Request
    begins: bool
    hits: KVCacheBlocks | None
    found: int
    computed: int
    num_tokens: int
    loaded: int
    is_cached_later: bool
    ahead: Sequence[Request]

    @property
    def block_size(self) -> int:
        size: int = self.manager.coordinator.scheduler_block_size
        return size

    @property
    def tables(self) -> tuple[Sequence[KVCacheBlock], ...]:
        """Returns the request's blocks in each KV-cache group."""
        return self.manager.get_blocks(self.request.request_id).blocks

    @property
    def held(self) -> Sequence[KVCacheBlock]:
        """Returns blocks of the first group: the request's own, or those that were found for a request that begins."""
        return self.hits.blocks[0] if self.hits is not None and any(self.hits.blocks) else self.tables[0]


class BlockPolicy:
    """Hooks of a policy; each does nothing unless a policy defines it.

    name: the name in `policies.POLICIES`. brings_tokens: whether `find` may return more tokens than the blocks of the
    prefix cache hold.
    """

    name = ""
    brings_tokens = False

    def attach(
        self,
        manager: KVCacheManager,
        is_of_use: Callable[[KVCacheBlock], bool],
        reused: Callable[[Iterable[KVCacheBlock]], None],
    ) -> FreeKVCacheBlockQueue | None:
        """Called once, before anything else. Returns the manager's queue of free blocks; None leaves it unchanged.

        is_of_use, reused: `holds` and `reused` of all policies.
        """
        return None

    def holds(self, block: KVCacheBlock) -> bool:
        """Returns whether a free block is worth keeping for future requests."""
        return False

    def reused(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Called when these blocks are about to be overwritten, or their contents are wrong."""

    def begin_step(self) -> None:
        """Called when a step is about to be scheduled."""

    def find(self, manager: KVCacheManager, request: Request, hit: Hit) -> Hit:
        """Returns what was found for a request that begins, extended or shortened if need be."""
        return hit

    def found(self, tokens: int) -> None:
        """Called with the number of tokens that were finally found for the request of the last `find`."""

    def passes_over(self, request: Request, seats: int) -> bool:
        """Returns True if a request waits for the next step, and those behind it may begin before it.

        seats: number of requests that may begin in this step or in the next one.
        """
        return False

    @property
    def ahead(self) -> Sequence[Request]:
        """Returns the requests that were passed over in this step."""
        return ()

    def kept_blocks(self) -> int:
        """Returns how many blocks to keep free for requests that were passed over."""
        return 0

    def may_begin(self, turn: Turn) -> bool:
        """Returns whether a request may begin; if not, it holds up those behind it."""
        return True

    def reserve(self, turn: Turn) -> bool:
        """Chooses the blocks that a request gets next; False if there are too few."""
        return True

    def given(self, turn: Turn) -> None:
        """Called when a request has the blocks that it asked for."""

    def not_given(self, turn: Turn) -> None:
        """Called when a request gets no blocks; the blocks that `reserve` chose are free again."""

    def preempted(self, request: Request, tables: Sequence[Sequence[KVCacheBlock]]) -> None:
        """Called when a request is about to be preempted."""

    def leaves(self, request: Request) -> None:
        """Called when a request is about to lose its blocks."""

    def ended(self, request: Request) -> None:
        """Called when a request has finished."""

    def reset(self) -> None:
        """Called when computed KV is no longer valid."""

    def before_step(self, scheduler: Scheduler) -> None:
        """Called before a step is scheduled in which workers carry out orders."""

    def orders(self, scheduler_output: SchedulerOutput) -> dict[str, Any]:
        """Returns fields of `MemoryOrders` for a step that was scheduled."""
        return {}

    def before_output(self, output: ModelRunnerOutput) -> None:
        """Called when a step has ended."""
