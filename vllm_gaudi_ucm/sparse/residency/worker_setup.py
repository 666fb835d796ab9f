"""Memory mode of a server: its worker's side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.sparse.residency.copy_store import CopyStore
from vllm_gaudi_ucm.sparse.residency.worker_side import ResidencyWorker
from vllm_gaudi_ucm.store.factory import open_store

if TYPE_CHECKING:
    from vllm_gaudi_ucm.connector.device_blocks import DeviceBlocks
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.runner.request_table import RequestTable
    from vllm_gaudi_ucm.sparse.device.sparse_worker import SparseWorker
    from vllm_gaudi_ucm.sparse.residency.options import MemoryModeOptions


def residency_worker(
    options: MemoryModeOptions,
    sparse: SparseWorker,
    table: RequestTable,
    blocks: DeviceBlocks,
    num_rows: int,
    device: Device,
) -> ResidencyWorker:
    """The worker's side of memory mode.

    Args:
        options: of memory mode.
        sparse: worker's side of the method, which keeps queries.
        table: block tables of the live requests.
        blocks: of the KV cache.
        num_rows: blocks that can have a copy.
        device: where the cache is.
    """
    selector, state = sparse.selector, sparse.state
    if selector is None or state is None or selector.scorer is None:
        raise ValueError("ucm.memory_mode: found a worker that keeps no queries, expected keep_queries before")
    store = open_store(options.open_options(num_rows, blocks.block_bytes), blocks.block_bytes)
    # what is on its way is all that the engine's own host memory is for
    engine = PrefetchOptions(prefetch_cache_size=2 * options.moves_per_step)
    copies = CopyStore(store, blocks.block_bytes, blocks.allocate, engine)
    worker = ResidencyWorker(table, state, selector.scorer, blocks, copies, device)
    worker.warm_up()
    return worker
