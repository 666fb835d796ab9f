"""Memory mode of a server: its worker's side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.config.prefetch_sections import memory_mode_prefetch
from vllm_gaudi_ucm.kv_offload.copy_store import CopyStore
from vllm_gaudi_ucm.kv_offload.worker_side import ResidencyWorker
from vllm_gaudi_ucm.store.factory import open_store
from vllm_gaudi_ucm.store.options import MemoryStoreOptions
from vllm_gaudi_ucm.store.shared_memory import new_memory_store

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.kv_cache.device_blocks import DeviceBlocks
    from vllm_gaudi_ucm.kv_offload.options import MemoryModeOptions
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker
    from vllm_gaudi_ucm.store.base import KvStore


def residency_worker(
    config: UcmConfig,
    sparse: SparseWorker,
    table: RequestTable,
    blocks: DeviceBlocks,
    num_rows: int,
    device: Device,
) -> ResidencyWorker:
    """The worker's side of memory mode.

    Args:
        config: memory mode is on in it.
        sparse: worker's side of the method, which keeps queries.
        table: block tables of the live requests.
        blocks: of the KV cache.
        num_rows: blocks that can have a copy.
        device: where the cache is.
    """
    selector, state = sparse.selector, sparse.state
    if selector is None or state is None or selector.scorer is None:
        raise ValueError("ucm.memory_mode: found a worker that keeps no queries, expected keep_queries before")
    store = _open_store(config.memory_mode, num_rows, blocks.block_bytes)
    copies = CopyStore(store, blocks.block_bytes, blocks.allocate, memory_mode_prefetch(config))
    worker = ResidencyWorker(table, state, selector.scorer, blocks, copies, device)
    worker.warm_up()
    return worker


def _open_store(options: MemoryModeOptions, num_rows: int, block_bytes: int) -> KvStore:
    found = options.open_options(num_rows, block_bytes)
    if isinstance(found, MemoryStoreOptions):
        # never the one of a connector with the same options: what that evicts would be copies
        return new_memory_store(found, block_bytes)
    return open_store(found, block_bytes)
