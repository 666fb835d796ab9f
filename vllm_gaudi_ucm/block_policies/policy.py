"""The hooks of a policy of the KV cache's blocks, which the manager of blocks and the scheduler call."""

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
    """First tokens of a request that need not be computed.

    blocks: of the prefix cache, and a block to copy from if `tokens` end inside of it. full: the full blocks among
    these. tokens: more than are in `blocks` if the rest comes from elsewhere. longest: the most tokens to find.
    """

    blocks: KVCacheBlocks
    full: KVCacheBlocks
    tokens: int
    longest: int


class Turn(NamedTuple):
    """A request that asks for slots.

    Args:
        manager: of the blocks.
        request: that asks.
        begins: whether it has no blocks yet.
        hits: blocks that were found for it.
        found: its first tokens that the prefix cache has.
        computed: the same, and those that a policy brings from elsewhere.
        num_tokens: that it will have slots for.
        loaded: tokens that a connector loads.
        is_cached_later: whether what it gets is put into the prefix cache later, because a load may fail.
        ahead: requests that begin in the next step, before it if it waits.
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
        """Its blocks in each KV-cache group."""
        return self.manager.get_blocks(self.request.request_id).blocks

    @property
    def held(self) -> Sequence[KVCacheBlock]:
        """Blocks of the first group: its own, or those that were found for one that begins."""
        return self.hits.blocks[0] if self.hits is not None and any(self.hits.blocks) else self.tables[0]


class BlockPolicy:
    """Hooks of a policy; each does nothing unless a policy defines it.

    name: as in `policies.POLICIES`. brings_tokens: whether `find` may say more tokens than the blocks of the prefix
    cache hold.
    """

    name = ""
    brings_tokens = False

    def attach(
        self,
        manager: KVCacheManager,
        is_of_use: Callable[[KVCacheBlock], bool],
        reused: Callable[[Iterable[KVCacheBlock]], None],
    ) -> FreeKVCacheBlockQueue | None:
        """Called once, before anything else. Returns the manager's queue of free blocks; None leaves it as it is.

        is_of_use, reused: `holds` and `reused` of all policies.
        """
        return None

    def holds(self, block: KVCacheBlock) -> bool:
        """Returns whether a free block is worth keeping for requests to come."""
        return False

    def reused(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Something else will be written to these blocks, or what is in them is wrong."""

    def begin_step(self) -> None:
        """A step is about to be scheduled."""

    def find(self, manager: KVCacheManager, request: Request, hit: Hit) -> Hit:
        """Returns more, or less, than was found for a request that begins."""
        return hit

    def found(self, tokens: int) -> None:
        """So many tokens were found in the end for the request of the last `find`."""

    def passes_over(self, request: Request, seats: int) -> bool:
        """Returns True if a request waits for the next step, and those behind it may begin before it.

        seats: for requests that begin in this step or in the next one.
        """
        return False

    @property
    def ahead(self) -> Sequence[Request]:
        """Requests that were passed over in this step."""
        return ()

    def kept_blocks(self) -> int:
        """Returns how many blocks to keep free for requests that were passed over."""
        return 0

    def may_begin(self, turn: Turn) -> bool:
        """Returns whether a request begins; one that may not holds up those behind it."""
        return True

    def reserve(self, turn: Turn) -> bool:
        """Chooses the blocks that a request gets next; False if there are too few."""
        return True

    def given(self, turn: Turn) -> None:
        """A request has the blocks that it asked for."""

    def not_given(self, turn: Turn) -> None:
        """A request has not; what `reserve` chose is free again."""

    def preempted(self, request: Request, tables: Sequence[Sequence[KVCacheBlock]]) -> None:
        """A request is about to be preempted."""

    def leaves(self, request: Request) -> None:
        """A request is about to lose its blocks."""

    def ended(self, request: Request) -> None:
        """A request has finished."""

    def reset(self) -> None:
        """Nothing that was computed is right any more."""

    def before_step(self, scheduler: Scheduler) -> None:
        """Before a step is scheduled, in which workers carry out orders."""

    def orders(self, scheduler_output: SchedulerOutput) -> dict[str, Any]:
        """Returns fields of `MemoryOrders` for a step that was scheduled."""
        return {}

    def before_output(self, output: ModelRunnerOutput) -> None:
        """A step has ended."""
