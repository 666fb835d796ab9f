"""Memory mode of a server: its scheduler's side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.config.prefetch_sections import blocks_ahead
from vllm_gaudi_ucm.kv_offload.request_blocks import RequestBlocks
from vllm_gaudi_ucm.kv_offload.scheduler_side import ResidencyScheduler
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.vllm_api.compat import kv_block_bytes

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.sparse.base import UcmSparseBase

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
