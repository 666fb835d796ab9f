"""A version of vLLM's block manager that calls policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from vllm_gaudi_ucm.block_policies.free_blocks import FreeBlocks
from vllm_gaudi_ucm.block_policies.policy import BlockPolicy, Hit, Turn
from vllm_gaudi_ucm.vllm_api.blocks import replace_free_blocks
from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock, KVCacheBlocks, KVCacheManager

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.steps import Request


class BlockManager(KVCacheManager):
    """Calls every policy in turn to decide which blocks requests find and get, and reports what happens to them."""

    _policies: tuple[BlockPolicy, ...]
    _brings_tokens: bool

    @classmethod
    def from_manager(cls, manager: KVCacheManager, policies: Sequence[BlockPolicy]) -> Self:
        """Returns a replacement that shares everything with `manager`, which must not be used any more."""
        made = cls.__new__(cls)
        made.__dict__.update(manager.__dict__)
        made._policies = tuple(policies)
        made._brings_tokens = any(policy.brings_tokens for policy in policies)
        keepers = [policy for policy in policies if type(policy).holds is not BlockPolicy.holds]
        is_of_use, reused = _of_use(keepers), made._reused if keepers else _forget_nothing
        queues = [policy.attach(made, is_of_use, reused) for policy in policies]
        queue = next((queue for queue in queues if queue is not None), None)
        if queue is None and keepers:
            queue = FreeBlocks.of(manager.block_pool.free_block_queue, is_of_use, reused)
        if queue is not None:
            replace_free_blocks(made, queue)
        return made

    def new_step_starts(self) -> None:
        super().new_step_starts()
        for policy in self._policies:
            policy.begin_step()

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """Returns blocks of the prefix cache and the number of first tokens that need not be computed: more than these
        blocks hold if a policy brings the rest.

        max_cache_hit_length: the most tokens to find; None: all but the last, which is computed for its logits. vLLM
        0.32 passes none.
        """
        # older versions of vLLM have no such parameter
        bound = () if max_cache_hit_length is None else (max_cache_hit_length,)
        full, num_tokens, boundary = super().get_computed_blocks(request, *bound)
        longest = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        hit = Hit(full, full, num_tokens, longest)
        for policy in self._policies:
            hit = policy.find(self, request, hit)
        for policy in self._policies:
            policy.found(hit.tokens)
        return hit.blocks, hit.tokens, boundary

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        """Returns the new blocks; None if the request does not begin in this step, or there is no room."""
        begins = not self.get_blocks(request.request_id).blocks[0]
        found = self._found(new_computed_blocks, num_new_computed_tokens)
        turn = Turn(
            manager=self,
            request=request,
            begins=begins,
            hits=new_computed_blocks,
            found=found,
            computed=num_new_computed_tokens,
            num_tokens=request.num_computed_tokens + found + num_new_tokens + num_lookahead_tokens,
            loaded=num_external_computed_tokens,
            is_cached_later=delay_cache_blocks,
            ahead=[one for policy in self._policies for one in policy.ahead] if begins else (),
        )
        if begins:
            if not all(policy.may_begin(turn) for policy in self._policies):
                # as if there were no room: vLLM stops starting waiting requests in this step
                return None
            kept = sum(policy.kept_blocks() for policy in self._policies)
            if kept:
                kwargs["reserved_blocks"] = kwargs.get("reserved_blocks", 0) + kept
        if not self._reserve(turn):
            return None
        blocks = super().allocate_slots(
            request,
            num_new_tokens,
            found,
            new_computed_blocks,
            num_lookahead_tokens,
            # new blocks, which are filled before the step is computed
            num_external_computed_tokens + num_new_computed_tokens - found,
            delay_cache_blocks,
            *args,
            **kwargs,
        )
        for policy in self._policies:
            if blocks is None:
                policy.not_given(turn)
            else:
                policy.given(turn)
        return blocks

    def _found(self, hits: KVCacheBlocks | None, num_tokens: int) -> int:
        """Returns how many of the tokens that need not be computed are in the prefix cache."""
        if not self._brings_tokens:
            return num_tokens
        # the same number in each group: blocks before a window are null blocks
        held = 0 if hits is None else min(len(group) for group in hits.blocks)
        return min(num_tokens, held * self.coordinator.scheduler_block_size)

    def _reserve(self, turn: Turn) -> bool:
        """Returns whether every policy has blocks for a request; if one has none, the others free what they chose."""
        for count, policy in enumerate(self._policies):
            if not policy.reserve(turn):
                for other in self._policies[:count]:
                    other.not_given(turn)
                return False
        return True

    def free(self, request: Request) -> None:
        self._leaves(request)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        self._leaves(request)
        return super().pop_blocks_for_free(request)

    def _leaves(self, request: Request) -> None:
        for policy in self._policies:
            policy.leaves(request)

    def evict_blocks(self, block_ids: set[int]) -> None:
        super().evict_blocks(block_ids)
        self._reused([self.block_pool.blocks[block_id] for block_id in block_ids])

    def _reused(self, blocks: Iterable[KVCacheBlock]) -> None:
        for policy in self._policies:
            policy.reused(blocks)

    def reset_prefix_cache(self) -> bool:
        is_reset = super().reset_prefix_cache()
        if is_reset:
            for policy in self._policies:
                policy.reset()
        return is_reset


def _of_use(keepers: Sequence[BlockPolicy]) -> Callable[[KVCacheBlock], bool]:
    """Returns a function that tells whether a policy wants to keep a free block."""
    if len(keepers) == 1:
        return keepers[0].holds
    return lambda block: any(policy.holds(block) for policy in keepers)


def _forget_nothing(blocks: Iterable[KVCacheBlock]) -> None:
    pass
