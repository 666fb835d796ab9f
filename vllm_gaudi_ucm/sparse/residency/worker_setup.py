"""Memory mode of a server: its worker's side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.sparse.residency.copy_store import CopyStore
from vllm_gaudi_ucm.sparse.residency.worker_side import ResidencyWorker
from vllm_gaudi_ucm.store.factory import open_store

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_ucm.config import UcmConfig
    from vllm_gaudi_ucm.runner.request_table import RequestTable
    from vllm_gaudi_ucm.sparse.device.sparse_worker import SparseWorker
    from vllm_gaudi_ucm.sparse.residency.block_copier import BlockCopier


def residency_worker(
    config: UcmConfig,
    sparse: SparseWorker,
    table: RequestTable,
    copier: BlockCopier,
    num_blocks: int,
    heads: int,
    dtype: torch.dtype,
) -> ResidencyWorker:
    """The worker's side of memory mode, for a method that chooses blocks.

    Args:
        sparse: worker's side of the method.
        table: block tables of the live requests.
        copier: blocks of the KV cache.
        num_blocks: of the KV cache.
        heads, dtype: of queries.
    """
    options, selector, state = config.memory_mode, sparse.selector, sparse.state
    if selector is None or state is None:
        raise ValueError("ucm.memory_mode: found a method that does not choose blocks, expected one that does")
    num_rows = options.max_away(num_blocks, copier.block_bytes)
    scorer = selector.score_all_blocks(num_rows, (heads, selector.key_size), dtype)
    scorer.warm_up()
    store = open_store(options.open_options(num_rows, copier.block_bytes), copier.block_bytes)
    # what is on its way is all that the engine's own host memory is for
    engine = PrefetchOptions(prefetch_cache_size=2 * options.moves_per_step)
    return ResidencyWorker(table, state, scorer, copier, CopyStore(store, copier.block_bytes, engine))
