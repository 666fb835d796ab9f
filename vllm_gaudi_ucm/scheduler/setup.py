"""Memory mode of a server: its scheduler's side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.config.ucm_config import blocks_ahead
from vllm_gaudi_ucm.kv_offload.request_blocks import RequestBlocks
from vllm_gaudi_ucm.kv_offload.scheduler_side import ResidencyScheduler
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.sparse.base import UcmSparseBase, UcmSparseRole
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.budget import shortest_sparse_context
from vllm_gaudi_ucm.sparse.factory import SparseMethodError, UcmSparseFactory
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.vllm_api.blocks import kv_block_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheManager

logger = plugin_logger(__name__)


def residency_role(
    config: UcmConfig,
    sparse: UcmSparseBase | None,
    block_size: int,
    manager: KVCacheManager,
) -> ResidencyScheduler | None:
    """The scheduler's side of memory mode, None where it is off."""
    if not config.memory_mode.enabled or sparse is None:
        return None
    method = sparse.selecting_method
    assert isinstance(method, BlockSparse), "refused when the configuration was read"
    num_rows = config.memory_mode.max_away(manager.block_pool.num_gpu_blocks, kv_block_bytes(manager))
    logger.info("Memory mode: up to %d blocks have a copy off the device.", num_rows)
    blocks = RequestBlocks(manager, block_size)
    options, ahead = method.block_options, blocks_ahead(config)
    residency = ResidencyScheduler(config.memory_mode, options, block_size, blocks, num_rows, ahead)
    method.has_gaps = residency.has_gaps
    return residency


def scheduler_role(config: UcmConfig, block_size: int, max_model_len: int) -> UcmSparseBase | None:
    """The method's object in the engine process, None without a method.

    Raises `SparseMethodError` for a method that changes how many slots requests have: nothing here would ask it.
    """
    name = config.ucm_sparse_method
    if name is None:
        return None
    method = UcmSparseFactory.create_sparse_method(name, UcmSparseRole.SCHEDULER, config)
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


_OURS = "vllm_gaudi_ucm.scheduler.scheduler"


def use_sparse_scheduler(vllm_config: VllmConfig) -> None:
    """Sets `scheduler_cls`, vLLM's extension point. Raises UnsupportedFeatureError where the user set another one."""
    if not _use_ours(vllm_config):
        raise UnsupportedFeatureError("ucm.ucm_sparse_method with a scheduler of your own", "--scheduler-cls")


def use_planning_scheduler(vllm_config: VllmConfig) -> None:
    """Sets it for our connector. A scheduler of the user's stays: blocks are loaded when a request's turn comes."""
    if not _use_ours(vllm_config):
        logger.warning("--scheduler-cls is not ours, so that nothing is prefetched for requests that wait.")


def _use_ours(vllm_config: VllmConfig) -> bool:
    """Whether it could be set, or was set before."""
    scheduler = vllm_config.scheduler_config
    ours = f"{_OURS}.{'UcmAsyncScheduler' if scheduler.async_scheduling else 'UcmScheduler'}"
    if scheduler.scheduler_cls not in (None, ours):
        return False
    scheduler.scheduler_cls = ours
    return True
