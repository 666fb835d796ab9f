"""vLLM's manager of blocks, and what is switched on beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from vllm_gaudi_ucm.memory.compaction import Compaction
from vllm_gaudi_ucm.memory.free_blocks import FreeBlocks
from vllm_gaudi_ucm.memory.free_runs import NO_BLOCK, FreeRuns
from vllm_gaudi_ucm.memory.slot_strips import SlotStrips
from vllm_gaudi_ucm.scheduler.admission import holds_blocks
from vllm_gaudi_ucm.vllm_api.blocks import replace_free_blocks
from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlocks, KVCacheManager

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_gaudi_ucm.memory.partial_hits import PartialHits
    from vllm_gaudi_ucm.memory.swaps import Swaps
    from vllm_gaudi_ucm.scheduler.admission import Admission
    from vllm_gaudi_ucm.scheduler.setup import BlockRules
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock
    from vllm_gaudi_ucm.vllm_api.steps import Request


class BlockManager(KVCacheManager):
    """Asks whether a request may begin; gives it parts of blocks that others have computed, what it had when it was
    preempted, and blocks or slots that follow each other.

    compaction: moves blocks; None: it is off.
    """

    compaction: Compaction | None
    _admission: Admission | None
    _partial: PartialHits | None
    _swaps: Swaps | None
    _runs: FreeRuns | None
    _strips: SlotStrips | None

    @classmethod
    def of(cls, manager: KVCacheManager, rules: BlockRules) -> Self:
        """The same manager: it shares everything with `manager`, which must not be used any more."""
        made = cls.__new__(cls)
        made.__dict__.update(manager.__dict__)
        made._admission, made._partial, made._swaps = rules.admission, rules.partial, rules.swaps
        made._runs = made._strips = made.compaction = None
        pool, partial = manager.block_pool, rules.partial
        is_of_use, reused = (_of_no_use, _forget_nothing) if partial is None else (partial.holds, partial.reused)
        if rules.strips is not None:
            made._strips = SlotStrips(pool, rules.strips, made.evict_blocks)
            replace_free_blocks(made, made._strips.free)
        elif rules.compacts:
            made._runs = FreeRuns.over(pool.blocks, pool.free_block_queue, is_of_use, reused)
            made.compaction = Compaction(pool, made._runs, made.evict_blocks, rules.totals)
            replace_free_blocks(made, made._runs)
        elif partial is not None:
            replace_free_blocks(made, FreeBlocks.of(pool.free_block_queue, is_of_use, reused))
        return made

    def new_step_starts(self) -> None:
        super().new_step_starts()
        if self._partial is not None:
            self._partial.begin_step()

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """Blocks of the prefix cache and the first tokens that need not be computed: more than are in these blocks
        where the rest comes from host memory.

        max_cache_hit_length: the most tokens to find; None: all but the last, which is computed for its logits. vLLM
        0.32 passes none.
        """
        # an older vLLM has no such parameter
        bound = () if max_cache_hit_length is None else (max_cache_hit_length,)
        full, num_tokens, boundary = super().get_computed_blocks(request, *bound)
        longest = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        if self._strips is not None:
            num_tokens = self._strips.longest_hit(request, full.blocks[0])
            full = self.truncate_computed_blocks(full, num_tokens)
        hits = full
        if self._partial is not None and self.prefix_cache_lookup_enabled(request):
            hits, num_tokens = self._partial.extend(request, full, num_tokens, longest)
        reach = 0 if self._swaps is None else min(self._swaps.reach(request), longest)
        if reach <= num_tokens:
            return hits, num_tokens, boundary
        if self._partial is not None:
            self._partial.needs_nothing()
        return full, reach, boundary

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
        """None: the request does not begin in this step, or there is no room."""
        begins = not holds_blocks(self, request.request_id)
        found = self._found(new_computed_blocks, num_new_computed_tokens)
        swapped = num_new_computed_tokens - found
        if begins:
            if not self._may_begin(request, new_computed_blocks, found):
                # as where there is no room: vLLM ends its turn of waiting requests
                return None
            if self._partial is not None and self._partial.passed_over:
                kwargs["reserved_blocks"] = kwargs.get("reserved_blocks", 0) + self._partial.kept_blocks()
        if self._runs is not None:
            self._expect(self._runs, request, new_computed_blocks)
        if self._strips is not None:
            held = self._held(request, new_computed_blocks)
            num_tokens = request.num_computed_tokens + found + num_new_tokens + num_lookahead_tokens
            if not self._strips.reserve(request, held, num_tokens, begins):
                return None
        blocks = super().allocate_slots(
            request,
            num_new_tokens,
            found,
            new_computed_blocks,
            num_lookahead_tokens,
            # new blocks, which are filled before the step is computed
            num_external_computed_tokens + swapped,
            delay_cache_blocks,
            *args,
            **kwargs,
        )
        if self._strips is not None:
            if blocks is None:
                self._strips.not_given(request, () if begins else self._blocks_of(request))
            else:
                self._strips.given(request)
        if blocks is None:
            return None
        if begins and self._swaps is not None:
            tables = self.get_blocks(request.request_id).blocks
            self._swaps.resumed(request, tables, found, num_new_computed_tokens)
        if self._partial is not None:
            tables = self.get_blocks(request.request_id).blocks
            if begins:
                self._partial.began(tables, found)
            # what is still to be loaded may fail
            if not delay_cache_blocks:
                others = found // self.coordinator.scheduler_block_size
                if num_external_computed_tokens:
                    others = -(-(found + num_external_computed_tokens) // self.coordinator.scheduler_block_size)
                self._partial.allotted(request, tables, others)
        return blocks

    def _found(self, hits: KVCacheBlocks | None, num_tokens: int) -> int:
        """Tokens that the prefix cache has, of those that need not be computed."""
        if self._swaps is None:
            return num_tokens
        # as many in each group: those before a window are null blocks
        held = 0 if hits is None else min(len(group) for group in hits.blocks)
        return min(num_tokens, held * self.coordinator.scheduler_block_size)

    def _may_begin(self, request: Request, hits: KVCacheBlocks | None, found: int) -> bool:
        ahead = () if self._partial is None else self._partial.passed_over
        if self._admission is not None and not self._admission.allows(request, self, hits, found, ahead):
            return False
        return self._partial is None or not self._partial.holds_up(request)

    def _expect(self, runs: FreeRuns, request: Request, hits: KVCacheBlocks | None) -> None:
        """Tells the queue whose blocks come next: those of the rest of its prompt, or of its next token."""
        held = self._held(request, hits)
        needed = -(-request.num_tokens // self.coordinator.scheduler_block_size)
        runs.expect(held[-1].block_id if held else NO_BLOCK, needed - len(held))

    def _held(self, request: Request, hits: KVCacheBlocks | None) -> Sequence[KVCacheBlock]:
        """A request that begins has no blocks but those that were found for it."""
        return hits.blocks[0] if hits is not None and any(hits.blocks) else self._blocks_of(request)

    def free(self, request: Request) -> None:
        self._leaves(request)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        self._leaves(request)
        return super().pop_blocks_for_free(request)

    def _leaves(self, request: Request) -> None:
        if self._strips is not None:
            self._strips.leaves(request)
        if self._partial is not None:
            self._partial.leaves(request)

    def evict_blocks(self, block_ids: set[int]) -> None:
        super().evict_blocks(block_ids)
        if self._partial is not None:
            self._partial.reused(self.block_pool.blocks[block_id] for block_id in block_ids)

    def reset_prefix_cache(self) -> bool:
        is_reset = super().reset_prefix_cache()
        if is_reset and self._partial is not None:
            self._partial.reset()
        if is_reset and self._swaps is not None:
            self._swaps.reset()
        if is_reset and self._strips is not None:
            self._strips.free.forget_cached()
        if is_reset and self._runs is not None:
            self._runs.sort_anew()
        return is_reset

    def _blocks_of(self, request: Request) -> Sequence[KVCacheBlock]:
        """Those of the first group: vLLM's own list, because this is asked for every request in every step."""
        return self.get_blocks(request.request_id).blocks[0]


def _of_no_use(block: KVCacheBlock) -> bool:
    return False


def _forget_nothing(blocks: Iterable[KVCacheBlock]) -> None:
    pass
