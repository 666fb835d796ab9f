"""The sparse method of a server, on the attention layers of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionImpl
from vllm_gaudi_ucm.memory.kv_cache import split_key_value
from vllm_gaudi_ucm.runner.attention_layers import attention_layers
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.device.block_selector import SelectionLayer
from vllm_gaudi_ucm.sparse.device.sparse_worker import ServerSizes, SparseWorker, summary_share
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

    from vllm_gaudi_ucm.config import UcmConfig


def make_sparse_worker(
    config: UcmConfig,
    vllm_config: VllmConfig,
    kv_caches: Mapping[str, torch.Tensor],
    block_size: int,
    num_blocks: int,
    static: bool,
) -> SparseWorker | None:
    """The worker side of `ucm_sparse_method`, None without one.

    kv_caches: [blocks, kv heads, block size, k | v] by layer name, bound to the layers. num_blocks, static: see
    ServerSizes.
    """
    if config.ucm_sparse_method is None:
        return None
    method = UcmSparseFactory.create_sparse_method(config.ucm_sparse_method, UcmSparseRole.WORKER, config)
    sizes = ServerSizes(
        max_model_len=vllm_config.model_config.max_model_len,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_rows=1 + vllm_config.num_speculative_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        static=static,
    )
    return SparseWorker(method, _layers(vllm_config, kv_caches), sizes)


def summaries_per_block(config: UcmConfig, specs: Mapping[str, KVCacheSpec]) -> float:
    """Bytes of a block's summaries over the bytes of its keys and values; 0 for a method without summaries."""
    if config.ucm_sparse_method is None:
        return 0.0
    method = UcmSparseFactory.create_sparse_method(config.ucm_sparse_method, UcmSparseRole.WORKER, config)
    selecting = method.selecting_method
    if not isinstance(selecting, BlockSparse):
        return 0.0
    spec = cast("AttentionSpec", next(iter(specs.values())))
    return summary_share(selecting.block_options, spec.block_size, spec.head_size, spec.dtype.itemsize)


def _layers(vllm_config: VllmConfig, kv_caches: Mapping[str, torch.Tensor]) -> dict[str, SelectionLayer]:
    """The layers in the model's order, which is the order they register in; tells each its place."""
    layers = {}
    for index, (name, layer) in enumerate(attention_layers(vllm_config).items()):
        implementation = cast("UnifiedAttentionImpl", layer.impl)  # type: ignore[attr-defined]  # of every attention layer
        implementation.layer_index = index
        keys, _ = split_key_value(kv_caches[name], implementation.head_size)
        layers[name] = SelectionLayer(keys, implementation.scale)
    return layers
