"""Keeps blocks of preempted requests in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.block_policies.policy import BlockPolicy
from vllm_gaudi_ucm.block_policies.swap.host_slots import HostSlots
from vllm_gaudi_ucm.block_policies.swap.swap_cost import SwapCost
from vllm_gaudi_ucm.block_policies.swap.swaps import Swaps
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.options.values import show_bytes
from vllm_gaudi_ucm.protocol.memory_orders import link_speed_of
from vllm_gaudi_ucm.vllm_api.blocks import kv_block_bytes, skipped_tokens
from vllm_gaudi_ucm.vllm_api.stage_layers import engine_block_bytes

if TYPE_CHECKING:
    from vllm_gaudi_ucm.block_policies.policy import Hit, Turn
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock, KVCacheManager, Scheduler
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, Request, SchedulerOutput

logger = plugin_logger(__name__)


class SwapPolicy(BlockPolicy):
    """Copies blocks out when a request is preempted, and back when it resumes.

    swaps: the state of all preempted requests.
    """

    name = "swap"
    brings_tokens = True

    def __init__(self, swaps: Swaps) -> None:
        self.swaps = swaps

    def find(self, manager: KVCacheManager, request: Request, hit: Hit) -> Hit:
        reach = min(self.swaps.reach(request), hit.longest)
        return hit if reach <= hit.tokens else hit._replace(blocks=hit.full, tokens=reach)

    def given(self, turn: Turn) -> None:
        if turn.begins:
            self.swaps.resumed(turn.request, turn.tables, turn.found, turn.computed)

    def preempted(self, request: Request, tables: Sequence[Sequence[KVCacheBlock]]) -> None:
        self.swaps.preempted(request, tables)

    def ended(self, request: Request) -> None:
        self.swaps.ended(request.request_id)

    def reset(self) -> None:
        self.swaps.reset()

    def orders(self, scheduler_output: SchedulerOutput) -> dict[str, Any]:
        outs, ins = self.swaps.take_orders()
        rates = self.swaps.cost.rates
        self.swaps.cost.step_begins(scheduler_output.total_num_scheduled_tokens, _prompt_tokens(scheduler_output))
        return {"rates": rates, "swap_outs": outs, "swap_ins": ins}

    def before_output(self, output: ModelRunnerOutput) -> None:
        self.swaps.cost.step_ends()
        speed = link_speed_of(output)
        if speed is not None:
            self.swaps.cost.measured(speed)


def _prompt_tokens(scheduler_output: SchedulerOutput) -> int:
    """Returns the tokens of requests that have several tokens that are not drafts."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    certain = (
        (count, count - len(drafts.get(name, ()))) for name, count in scheduler_output.num_scheduled_tokens.items()
    )
    return sum(count for count, known in certain if known > 1)


def make_swap(scheduler: Scheduler, config: UcmConfig, totals: MemoryTotals) -> SwapPolicy:
    """Makes the policy. Raises UcmConfigError if host memory holds no block."""
    options = config.preemption
    manager, groups = scheduler.kv_cache_manager, scheduler.kv_cache_config.kv_cache_groups
    engine_bytes = engine_block_bytes(kv_block_bytes(manager), groups, scheduler.vllm_config)
    slots = HostSlots(options.host_memory // engine_bytes)
    if not slots.count:
        wanted = f"room for a block of the KV cache, {show_bytes(engine_bytes)}, or more"
        raise UcmConfigError([Problem("ucm.preemption.host_memory", show_bytes(options.host_memory), wanted)])
    logger.info("Preemption %s: up to %d blocks of preempted requests in host memory.", options.mode, slots.count)
    # each rank of a stage copies its own heads, at the same time as the others
    ahead = bool(scheduler.scheduler_config.async_scheduling)
    rank_bytes = engine_bytes // scheduler.parallel_config.tensor_parallel_size
    cost = SwapCost(scheduler.block_size, rank_bytes, queues=ahead)
    always, skipped = options.mode == "swap", skipped_tokens(manager)
    return SwapPolicy(
        Swaps(slots, scheduler.block_size, engine_bytes, cost, always=always, totals=totals, skipped=skipped)
    )
