"""Makes the objects of our scheduler: its sparse method, KV offload, prefetch for waiting requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.config.ucm_config import UcmConfig, block_options, blocks_ahead, idle_options, resolve_config
from vllm_gaudi_ucm.connector.connector import UcmConnector, our_connector
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.memory_mode.request_blocks import RequestBlocks
from vllm_gaudi_ucm.memory_mode.scheduler_side import OffloadScheduler, OnWanted
from vllm_gaudi_ucm.scheduler.choice_cost import register_choice_cost
from vllm_gaudi_ucm.scheduler.parts import (
    FailedRequests,
    MemorySteps,
    OffloadedSteps,
    ResentItems,
    SchedulerPart,
    SparseSteps,
    SparseStepsAhead,
    WaitingRequests,
)
from vllm_gaudi_ucm.scheduler.scheduler_class import warms_by_order
from vllm_gaudi_ucm.scheduler.warm_up_steps import WarmUpSteps
from vllm_gaudi_ucm.sparse.base import UcmSparseBase, UcmSparseRole
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.budget import shortest_sparse_context
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.late_decisions import decides_late
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.sparse.registry import SparseMethodError
from vllm_gaudi_ucm.vllm_api.blocks import kv_block_bytes
from vllm_gaudi_ucm.vllm_api.engine_process import sigterm_notice
from vllm_gaudi_ucm.vllm_api.platforms import reads_pictures

if TYPE_CHECKING:
    from vllm_gaudi_ucm.block_policies.policies import BlockPolicies
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheManager, Scheduler

logger = plugin_logger(__name__)


def make_parts(scheduler: Scheduler, policies: BlockPolicies) -> tuple[SchedulerPart, ...]:
    """Returns the parts that are switched on, in the order in which the scheduler calls them."""
    config = resolve_config(scheduler.vllm_config.additional_config)
    parts: list[SchedulerPart] = []
    if policies.give_orders:
        parts.append(MemorySteps(scheduler, policies))
    if warms_by_order(scheduler.vllm_config, config):
        parts.append(WarmUpSteps(scheduler, sigterm_notice()))
    pictures = reads_pictures(scheduler.vllm_config)
    if pictures or scheduler.vllm_config.lora_config is not None:
        parts.append(FailedRequests(scheduler))
    if pictures:
        parts.append(ResentItems(scheduler))
    sparse = _sparse_steps(scheduler, config)
    if sparse is not None:
        parts.append(sparse)
    # other connectors do not need to know which requests wait
    ours = our_connector(scheduler.connector)
    if ours is not None:
        parts.append(WaitingRequests(scheduler, ours))
    elif idle := idle_options(config):
        where = "see --kv-transfer-config, and ucm.memory_mode.store"
        logger.warning("GSA's options %s do nothing without a store: %s.", ", ".join(idle), where)
    return tuple(parts)


def _sparse_steps(scheduler: Scheduler, config: UcmConfig) -> SparseSteps | None:
    block_size, max_model_len = scheduler.block_size, scheduler.max_model_len
    if config.ucm_sparse_method is None or not config.memory_mode.enabled:
        method = scheduler_role(config, block_size, max_model_len)
        if method is None:
            return None
        register_choice_cost(scheduler, method)
        _log_where_choosing_pays(scheduler, method)
        return (SparseStepsAhead if decides_late(scheduler.vllm_config) else SparseSteps)(scheduler, method)
    # combined with other connectors, ours makes only its own loads, so that no blocks are left in its store
    connector = scheduler.connector if isinstance(scheduler.connector, UcmConnector) else None
    # its side opens below
    on_wanted = None if connector is None else lambda *wanted: connector.scheduler.wanted_by_query(*wanted)
    offload = offload_role(config, block_size, scheduler.kv_cache_manager, on_wanted)
    # with blocks off the device, a step that chooses nothing would not be exact
    method = scheduler_role(config, block_size, max_model_len, has_gaps=offload.has_gaps)
    assert method is not None, "one is configured"
    if connector is None:
        return OffloadedSteps(scheduler, method, offload)
    connector.open_scheduler_side(offload)
    return OffloadedSteps(scheduler, method, offload, connector.scheduler.fetch)


def _log_where_choosing_pays(scheduler: Scheduler, method: UcmSparseBase) -> None:
    """Logs at start from which length steps are sparse, if they are dense when that is faster."""
    choosing = method.selecting_method
    if not isinstance(choosing, BlockSparse) or choosing.choice_cost is None:
        return
    longest, requests = scheduler.max_model_len, scheduler.max_num_running_reqs
    lengths = {
        count: choosing.choice_cost.shortest_context(scheduler.block_size, choosing.block_options, count, longest)
        for count in sorted({1, requests})
    }
    found = [f"{length} tokens of {count} request(s)" for count, length in lengths.items() if length is not None]
    logger.info(
        "Sparse method %s: a step is sparse if that is estimated to be faster: %s. sparse_steps 'always' makes every "
        "decode of such a context sparse.",
        type(choosing).__name__,
        "from " + ", from ".join(found) if found else f"here never, up to --max-model-len {longest}",
    )


def offload_role(
    config: UcmConfig, block_size: int, manager: KVCacheManager, on_wanted: OnWanted | None = None
) -> OffloadScheduler:
    """Makes the scheduler's side of KV offload. on_wanted: see OffloadScheduler."""
    options = block_options(config)
    assert options is not None, "refused when the configuration was read"
    blocks = RequestBlocks(manager, block_size)
    num_rows = config.memory_mode.max_copies(manager.block_pool.num_gpu_blocks, kv_block_bytes(manager, blocks.group))
    logger.info("Memory mode: up to %d blocks have a copy off the device.", num_rows)
    return OffloadScheduler(
        config.memory_mode,
        options,
        block_size,
        blocks,
        num_rows=num_rows,
        num_ahead=blocks_ahead(config),
        on_wanted=on_wanted,
    )


def scheduler_role(config: UcmConfig, block_size: int, max_model_len: int, **parts: Any) -> UcmSparseBase | None:
    """Returns the method's object in the engine process; None without a method.

    parts: see `UcmSparseFactory.create_sparse_method`. Raises `SparseMethodError` for a method that changes how many
    slots requests have, because its hooks would not be called here.
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
        logger.info("Sparse method %s: contexts of %d tokens and more can be sparse.", name, shortest)
        if shortest > max_model_len:
            logger.warning(
                "Sparse method %s: no request will be sparse, because contexts end at --max-model-len %d and the "
                "shortest sparse context is %d tokens; lower min_tokens or the windows, or raise --max-model-len.",
                name,
                max_model_len,
                shortest,
            )
    return method
