"""Where the objects of our scheduler are made: its sparse method, KV offload, prefetch for requests that wait."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_gaudi_ucm.config.ucm_config import block_options, blocks_ahead, idle_options, resolve_config
from vllm_gaudi_ucm.connector.connector import UcmConnector, our_connector
from vllm_gaudi_ucm.kv_offload.request_blocks import RequestBlocks
from vllm_gaudi_ucm.kv_offload.scheduler_side import OffloadScheduler, OnWanted
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.memory.host_slots import HostSlots
from vllm_gaudi_ucm.memory.partial_hits import PartialHits
from vllm_gaudi_ucm.memory.swap_cost import SwapCost
from vllm_gaudi_ucm.memory.swaps import Swaps
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.options.values import show_bytes
from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
from vllm_gaudi_ucm.scheduler.admission import Admission
from vllm_gaudi_ucm.scheduler.admission_rules import make_rule
from vllm_gaudi_ucm.scheduler.parts import (
    MemorySteps,
    OffloadedSteps,
    SchedulerPart,
    SparseSteps,
    WaitingRequests,
    may_be_sparse,
)
from vllm_gaudi_ucm.sparse.base import UcmSparseBase, UcmSparseRole
from vllm_gaudi_ucm.sparse.budget import shortest_sparse_context
from vllm_gaudi_ucm.sparse.factory import SparseMethodError, UcmSparseFactory
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.vllm_api.blocks import kv_block_bytes

if TYPE_CHECKING:
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.memory.compaction import Compaction
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheManager, Scheduler
    from vllm_gaudi_ucm.vllm_api.steps import Request

logger = plugin_logger(__name__)


class BlockRules(NamedTuple):
    """What decides over blocks beside vLLM; None: it is switched off.

    compacts: whether blocks are to follow each other, and move.
    """

    admission: Admission | None
    partial: PartialHits | None
    swaps: Swaps | None
    compacts: bool
    totals: MemoryTotals

    @property
    def are_any(self) -> bool:
        return self.compacts or any(rule is not None for rule in (self.admission, self.partial, self.swaps))


def make_block_rules(scheduler: Scheduler) -> BlockRules:
    """What the configuration switches on."""
    config, totals = resolve_config(scheduler.vllm_config.additional_config), MemoryTotals()
    admission, partial = _admission(scheduler, config, totals), _partial_hits(scheduler, config, totals)
    return BlockRules(admission, partial, _swaps(scheduler, config, totals), config.kv_cache.compaction, totals)


def _swaps(scheduler: Scheduler, config: UcmConfig, totals: MemoryTotals) -> Swaps | None:
    """None with `recompute`, which is vLLM's. Raises UcmConfigError for host memory that holds no block."""
    options = config.preemption
    if not options.swaps:
        return None
    block_bytes = kv_block_bytes(scheduler.kv_cache_manager)
    slots = HostSlots(options.host_memory // block_bytes)
    if not slots.count:
        wanted = f"room for a block of the KV cache, {show_bytes(block_bytes)}, or more"
        raise UcmConfigError([Problem("ucm.preemption.host_memory", show_bytes(options.host_memory), wanted)])
    logger.info("Preemption %s: up to %d blocks of preempted requests in host memory.", options.mode, slots.count)
    cost = SwapCost(scheduler.block_size, block_bytes)
    return Swaps(slots, scheduler.block_size, block_bytes, cost, options.mode == "swap", totals)


def _partial_hits(scheduler: Scheduler, config: UcmConfig, totals: MemoryTotals) -> PartialHits | None:
    if not config.kv_cache.partial_hits:
        return None
    has_method = config.ucm_sparse_method is not None

    def root(request: Request) -> Hashable:
        is_sparse = has_method and may_be_sparse(request)
        adapter = request.lora_request.lora_name if request.lora_request else None
        return is_sparse, request.cache_salt, adapter

    logger.info("Partial hits: requests take the part of a block that agrees with their prompt as a copy.")
    # what a connector finds may be longer than what a request would wait for
    return PartialHits(scheduler.block_size, root, scheduler.connector is None, totals)


def _admission(scheduler: Scheduler, config: UcmConfig, totals: MemoryTotals) -> Admission | None:
    """None with `greedy`, which is vLLM's."""
    options = config.scheduler
    # requests with drafts generate different numbers of tokens in a step
    rule = make_rule(options, scheduler.block_size, in_step=scheduler.num_spec_tokens == 0)
    if rule is None:
        return None
    logger.info("Admission %s: a request waits until the KV cache has room for its answer.", options.admission)
    return Admission(scheduler, rule, totals)


def make_parts(
    scheduler: Scheduler, rules: BlockRules, compaction: Compaction | None = None
) -> tuple[SchedulerPart, ...]:
    """What is switched on, in the order in which the scheduler calls it."""
    config = resolve_config(scheduler.vllm_config.additional_config)
    parts: list[SchedulerPart] = []
    if rules.are_any:
        parts.append(MemorySteps(scheduler, rules.totals, compaction, rules.swaps))
    sparse = _sparse_steps(scheduler, config)
    if sparse is not None:
        parts.append(sparse)
    # others than our connector do not ask who waits
    ours = our_connector(scheduler.connector)
    if ours is not None:
        parts.append(WaitingRequests(scheduler, ours.plan_prefetch))
    elif idle := idle_options(config):
        where = "see --kv-transfer-config, and ucm.memory_mode.store"
        logger.warning("GSA's options %s do nothing without a store: %s.", ", ".join(idle), where)
    return tuple(parts)


def _sparse_steps(scheduler: Scheduler, config: UcmConfig) -> SparseSteps | None:
    block_size, max_model_len = scheduler.block_size, scheduler.max_model_len
    if config.ucm_sparse_method is None or not config.memory_mode.enabled:
        method = scheduler_role(config, block_size, max_model_len)
        return None if method is None else SparseSteps(scheduler, method)
    # beside other connectors only our own loads, so that nothing is left in its store
    connector = scheduler.connector if isinstance(scheduler.connector, UcmConnector) else None
    on_wanted = None if connector is None else connector.wanted_by_query
    offload = offload_role(config, block_size, scheduler.kv_cache_manager, on_wanted)
    method = scheduler_role(config, block_size, max_model_len, has_gaps=offload.has_gaps)
    assert method is not None, "one is configured"
    if connector is None:
        return OffloadedSteps(scheduler, method, offload)
    connector.open_scheduler_side(offload)
    return OffloadedSteps(scheduler, method, offload, connector.fetch)


def offload_role(
    config: UcmConfig, block_size: int, manager: KVCacheManager, on_wanted: OnWanted | None = None
) -> OffloadScheduler:
    """The scheduler's side of KV offload. on_wanted: see OffloadScheduler."""
    options = block_options(config)
    assert options is not None, "refused when the configuration was read"
    num_rows = config.memory_mode.max_copies(manager.block_pool.num_gpu_blocks, kv_block_bytes(manager))
    logger.info("Memory mode: up to %d blocks have a copy off the device.", num_rows)
    blocks = RequestBlocks(manager, block_size)
    return OffloadScheduler(config.memory_mode, options, block_size, blocks, num_rows, blocks_ahead(config), on_wanted)


def scheduler_role(config: UcmConfig, block_size: int, max_model_len: int, **parts: Any) -> UcmSparseBase | None:
    """The method's object in the engine process, None without a method.

    parts: see `UcmSparseFactory.create_sparse_method`. Raises `SparseMethodError` for a method that changes how many
    slots requests have: nothing here would ask it.
    """
    name = config.ucm_sparse_method
    if name is None:
        return None
    method = UcmSparseFactory.create_sparse_method(name, UcmSparseRole.SCHEDULER, config, **parts)
    selecting = method.selecting_method
    for hook in ("estimate_num_slots_sparsed", "allocate_slots"):
        if getattr(type(selecting), hook) is not getattr(UcmSparseBase, hook):
            raise SparseMethodError(
                f"ucm.ucm_sparse_method: found {name!r}, whose {type(selecting).__name__}.{hook} changes the slots of "
                "requests, expected a method that leaves them alone; this version keeps every block of a request"
            )
    method.register_block_size(block_size)
    options = selecting.options
    if isinstance(options, BlockOptions):
        shortest = shortest_sparse_context(block_size, options)
        logger.info("Sparse method %s: contexts of %d tokens and more are sparse.", name, shortest)
        if shortest > max_model_len:
            logger.warning(
                "Sparse method %s: no request will be sparse, because contexts end at --max-model-len %d and the "
                "shortest sparse context is %d tokens; lower min_tokens or the windows, or raise --max-model-len.",
                name,
                max_model_len,
                shortest,
            )
    return method
