"""Memory mode of a server: its worker's side."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.config.prefetch_sections import memory_mode_prefetch
from vllm_gaudi_ucm.kv_offload.copy_folder import CopyFolder
from vllm_gaudi_ucm.kv_offload.copy_store import CopyStore
from vllm_gaudi_ucm.kv_offload.worker_side import ResidencyWorker
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.store.factory import open_medium, open_store
from vllm_gaudi_ucm.store.options import FileStoreOptions, MemoryStoreOptions
from vllm_gaudi_ucm.store.shared_memory import new_memory_store

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.kv_cache.device_blocks import DeviceBlocks
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
    copies = open_copies(config, num_rows, blocks)
    worker = ResidencyWorker(table, state, selector.scorer, blocks, copies, device)
    worker.warm_up()
    return worker


def open_copies(config: UcmConfig, num_rows: int, blocks: DeviceBlocks) -> CopyStore:
    """Where copies go: a store of this engine alone, which evicts none of them.

    Raises UcmConfigError for a folder that cannot be used, or a capacity below one block.
    """
    options, block_bytes = config.memory_mode.open_options(num_rows, blocks.block_bytes), blocks.block_bytes
    folder: CopyFolder | None = None
    store: KvStore | None = None
    try:
        if isinstance(options, MemoryStoreOptions):
            # never the one of a connector with the same options: what that evicts would be copies
            store = new_memory_store(options, block_bytes, evicts=False)
        else:
            if isinstance(options, FileStoreOptions):
                folder = _own_folder(options)
                options = options.model_copy(update={"path": folder.path})
            store = open_store(options, block_bytes, evicts=False)
        return CopyStore(store, block_bytes, blocks.allocate, memory_mode_prefetch(config), folder)
    except BaseException:
        if store is not None:
            store.close()
        if folder is not None:
            folder.remove()
        raise


def _own_folder(options: FileStoreOptions) -> CopyFolder:
    try:
        # makes the folder, or refuses one of something else
        open_medium(options).close()
        return CopyFolder(options.path)
    except UcmConfigError as error:
        problems = [replace(problem, key=f"ucm.memory_mode.{problem.key}") for problem in error.problems]
        raise UcmConfigError(problems) from error
    except OSError as error:
        found = f"{options.path} ({error.strerror})"
        wanted = "a folder that this user owns, or may make"
        raise UcmConfigError([Problem("ucm.memory_mode.store.path", found, wanted)]) from error
