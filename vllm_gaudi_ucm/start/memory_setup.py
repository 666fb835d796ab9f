"""Makes the worker of block orders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.config.exclusions import policies_give_orders
from vllm_gaudi_ucm.kv_cache.pair import distinct, in_blocks
from vllm_gaudi_ucm.memory.memory_worker import MemoryWorker
from vllm_gaudi_ucm.observability.room_metrics import MemoryMetrics
from vllm_gaudi_ucm.vllm_api.stage_layers import engine_block_bytes

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_ucm.runner.loaded_model import AllocatedModel


def make_memory(allocated: AllocatedModel) -> MemoryWorker | None:
    """Makes the worker of block orders; None if the scheduler sends no orders."""
    model, sparse = allocated.model, allocated.sparse
    if not policies_give_orders(model.config):
        return None
    summaries: list[torch.Tensor] = []
    followers = [allocated.requests.moved]
    if sparse is not None and sparse.selector is not None and sparse.state is not None:
        summaries = sparse.selector.summaries
        followers.append(sparse.state.summaries.moved)
    memory = MemoryWorker(
        allocated.kv_caches,
        allocated.block_size,
        model.device,
        metrics=MemoryMetrics(allocated.metrics.file),
        least=model.ranks.least,
        host_slots=_host_slots(allocated) if model.config.preemption.swaps else None,
        summaries=summaries,
        followers=followers,
    )
    memory.warm_up()
    return memory


def _host_slots(allocated: AllocatedModel) -> int:
    """Returns the same number of host slots as the scheduler counts."""
    caches, vllm_config = distinct(allocated.kv_caches.values()), allocated.model.vllm_config
    block_bytes = sum(blocks[0].nbytes for pair in caches for blocks in in_blocks(pair, allocated.block_size))
    engine_bytes = engine_block_bytes(block_bytes, allocated.kv_cache_config.kv_cache_groups, vllm_config)
    return allocated.model.config.preemption.host_memory // engine_bytes
