"""Admits waiting requests by the room that their answers will need in the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.block_policies.admission.future_blocks import UNKNOWN, Footprint, peak_blocks
from vllm_gaudi_ucm.block_policies.policy import BlockPolicy, Turn
from vllm_gaudi_ucm.graphs.shapes.group_room import most_blocks
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.vllm_api.blocks import kv_block_lists, skipped_tokens
from vllm_gaudi_ucm.vllm_api.kv_cache import kept_tokens
from vllm_gaudi_ucm.vllm_api.steps import Request, RequestStatus

if TYPE_CHECKING:
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock, KVCacheManager, Scheduler

logger = plugin_logger(__name__)


class GroupBlocks:
    """Counts blocks in the groups of one engine, which share one pool and one block size."""

    def __init__(self, manager: KVCacheManager, block_size: int) -> None:
        windows = kept_tokens(manager.kv_cache_config.kv_cache_groups)
        self._block_size = block_size
        self._skipped = skipped_tokens(manager)
        self._wholes = [number for number, window in enumerate(windows) if window is None]
        self._windows = [(number, window) for number, window in enumerate(windows) if window is not None]

    @property
    def whole(self) -> int:
        """Returns the number of groups that keep whole contexts."""
        return len(self._wholes)

    def wholes(self, tables: Sequence[Sequence[KVCacheBlock]]) -> list[int]:
        """Returns the ids of a request's blocks in the groups that keep whole contexts."""
        return [block.block_id for number in self._wholes for block in tables[number]]

    def most(
        self, request: Request, ahead: int, rows: int, tables: Sequence[Sequence[KVCacheBlock]]
    ) -> tuple[int, ...]:
        """Returns, for each group with a window, the most blocks that a request will have at a time.

        A window gives blocks back when the request's next step is scheduled: until then it has the blocks of a window
        before the first token of a step, and the blocks of the step's tokens.

        ahead: tokens after the context for which slots are kept. rows: the most tokens of a prompt in a step. tables:
            the request's current blocks, which may be more: the blocks of the last chunk of its prompt.
        """
        left = request.num_tokens - request.num_computed_tokens
        step = max(1, min(left, rows)) + ahead
        return tuple(
            max(most_blocks(window - 1 + step, self._block_size), sum(not block.is_null for block in tables[number]))
            for number, window in self._windows
        )


class Admission(BlockPolicy):
    """Lets a waiting request begin if the KV cache has room for it and for all running requests, each with all of its
    `max_tokens`.

    vLLM's order, first come, first served, is kept: a request that may not begin yet holds up the requests after it. A
    request always begins if no other one runs.

    Args:
        scheduler: vLLM's scheduler; only read.
        in_step: see `peak_blocks`.
        steps_ahead: number of steps that are scheduled before the tokens of the previous step are known. An end that
            becomes known that late costs no block: the last token of an answer, which counts here, is never computed.
    """

    name = "admission"

    def __init__(
        self,
        scheduler: Scheduler,
        totals: MemoryTotals,
        groups: GroupBlocks,
        *,
        in_step: bool,
        steps_ahead: int = 0,
    ) -> None:
        self._steps_ahead = steps_ahead
        self._scheduler = scheduler
        self._in_step = in_step
        self._refused: tuple[object, ...] | None = None
        self._totals = totals
        self._groups = groups

    def may_begin(self, turn: Turn) -> bool:
        request, manager, hits = turn.request, turn.manager, turn.hits
        active = [*self._active(manager), *turn.ahead]
        if not active:
            return True
        shared = turn.found // self._scheduler.block_size
        found = [] if hits is None else self._groups.wholes([group[:shared] for group in hits.blocks])
        asked = request.request_id, shared, *(one.request_id for one in active)
        # only the end of a request makes room
        if asked != self._refused:
            self._refused = None if self._fits(request, active, manager, found) else asked
        self._totals.admission_waits += self._refused is not None
        return self._refused is None

    def _active(self, manager: KVCacheManager) -> list[Request]:
        """Returns the requests with blocks, in the order in which they got their first block. The queue may be long, so
        this reads the manager's table, which lists only these requests.
        """
        known = self._scheduler.requests
        return [known[name] for name, blocks in kv_block_lists(manager, 0).items() if blocks and name in known]

    def _fits(self, request: Request, active: list[Request], manager: KVCacheManager, hits: list[int]) -> bool:
        tables = [manager.get_blocks(one.request_id).blocks for one in active]
        delays = self._delays([*active, request])
        future = [
            self._footprint(one, blocks, own, delay)
            for one, blocks, own, delay in zip(
                [*active, request],
                [*map(self._groups.wholes, tables), hits],
                [*tables, manager.empty_kv_cache_blocks.blocks],
                delays,
                strict=True,
            )
        ]
        pool = manager.block_pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        held = {block.block_id for own in tables for blocks in own for block in blocks if not block.is_null}
        # blocks of finished requests that a connector is still reading
        others = used - len(held)
        peak = peak_blocks(future, self._scheduler.block_size, in_step=self._in_step)
        return others + peak < pool.num_gpu_blocks

    def _footprint(
        self, request: Request, blocks: list[int], tables: Sequence[Sequence[KVCacheBlock]], delay: int
    ) -> Footprint:
        """Makes the footprint of a request. blocks: ids of blocks that it keeps. tables: its blocks in each group."""
        scheduler, tokens = self._scheduler, request.num_tokens
        # tokens that running steps will generate count as generated
        given = min(request.num_output_placeholders, request.max_tokens - request.num_output_tokens)
        tokens, generated = tokens + given, request.num_output_tokens + given
        most = min(request.max_tokens - generated, scheduler.max_model_len - tokens)
        ahead = max(scheduler.num_lookahead_tokens, scheduler.num_spec_tokens)
        # a step ahead has room for drafts after those of the previous step
        ahead += 2 * self._steps_ahead * scheduler.num_spec_tokens
        # chunks of a prompt that are in flight in several stages keep their windows
        chunk = scheduler.max_num_scheduled_tokens * scheduler.parallel_config.pipeline_parallel_size
        windows = self._groups.most(request, ahead, chunk, tables)
        whole = self._groups.whole
        return Footprint(blocks, tokens + ahead, max(most, 0), delay, whole=whole, windows=windows)

    def _delays(self, requests: list[Request]) -> list[int]:
        """Returns the most steps until each request has computed its prompt, with one token of each other per step."""
        scheduler = self._scheduler
        rows = scheduler.max_num_scheduled_tokens - len(requests)
        longest = scheduler.scheduler_config.long_prefill_token_threshold
        rows = max(1, min(rows, longest) if longest else rows)
        ahead = accumulate(
            max(0, one.num_tokens + one.num_output_placeholders - one.num_computed_tokens - 1) for one in requests
        )
        return [
            UNKNOWN if self._waits(one) else -(-max(tokens, 0) // rows) + 1
            for one, tokens in zip(requests, ahead, strict=True)
        ]

    @staticmethod
    def _waits(request: Request) -> bool:
        """Returns whether a request waits for a load or for its next input."""
        return request.status in (
            RequestStatus.WAITING_FOR_REMOTE_KVS,
            RequestStatus.WAITING_FOR_STREAMING_REQ,
        )


def make_admission(scheduler: Scheduler, config: UcmConfig, totals: MemoryTotals) -> Admission:
    """Makes the policy for the rule `exact`."""
    # with drafts, or several batches in flight, requests generate different numbers of tokens in the same time
    in_step = scheduler.num_spec_tokens == 0 and not scheduler.use_pp
    logger.info("Admission %s: a request waits until the KV cache has room for its answer.", config.scheduler.admission)
    groups = GroupBlocks(scheduler.kv_cache_manager, scheduler.block_size)
    ahead = int(bool(scheduler.scheduler_config.async_scheduling))
    return Admission(scheduler, totals, groups, in_step=in_step, steps_ahead=ahead)
