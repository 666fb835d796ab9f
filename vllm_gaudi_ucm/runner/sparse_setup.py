"""The sparse method of a server, on the attention layers of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionImpl
from vllm_gaudi_ucm.config.block_options import block_options
from vllm_gaudi_ucm.connector.transfer_config import loads_partly
from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.graphs.shapes.tail_shapes import tail_rows
from vllm_gaudi_ucm.kv_cache.allocation import split_key_value
from vllm_gaudi_ucm.kv_cache.attention_layers import attention_layers
from vllm_gaudi_ucm.kv_cache.device_blocks import DeviceBlocks
from vllm_gaudi_ucm.runner.offload_setup import residency_worker
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.selection.block_selector import SelectionLayer
from vllm_gaudi_ucm.sparse.selection.sparse_worker import ServerSizes, SparseWorker, selection_limits, summary_share
from vllm_gaudi_ucm.speculation.draft_layers import is_draft_layer

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig


def make_sparse_worker(
    config: UcmConfig,
    vllm_config: VllmConfig,
    kv_caches: Mapping[str, torch.Tensor],
    block_size: int,
    num_blocks: int,
    static: bool,
    table: RequestTable | None = None,
) -> SparseWorker | None:
    """The worker side of `ucm_sparse_method`, None without one.

    kv_caches: [blocks, kv heads, block size, k | v] by layer name, bound to the layers. num_blocks, static: see
    ServerSizes. table: block tables of the live requests; without it nothing is moved in memory mode.
    """
    if config.ucm_sparse_method is None:
        return None
    method = UcmSparseFactory.create_sparse_method(config.ucm_sparse_method, UcmSparseRole.WORKER, config)
    sizes = _sizes(vllm_config, block_size, num_blocks, static)._replace(
        some_away=config.memory_mode.enabled, tail_rows=_tail_rows(config, vllm_config, block_size)
    )
    worker = SparseWorker(method, _layers(vllm_config, kv_caches), sizes)
    if config.memory_mode.enabled:
        device = get_device(next(iter(kv_caches.values())).device.type)
        blocks = DeviceBlocks(kv_caches, device)
        # a cache for measurements has one block only
        num_rows = 1 if table is None else config.memory_mode.max_away(num_blocks, blocks.block_bytes)
        worker.keep_queries(num_rows, _query_heads(vllm_config), cast("torch.dtype", vllm_config.model_config.dtype))
        if table is not None:
            worker.residency = residency_worker(config, worker, table, blocks, num_rows, device)
    return worker


def max_selected_blocks(
    config: UcmConfig, vllm_config: VllmConfig, block_size: int, num_blocks: int, static: bool
) -> int:
    """Blocks that all requests of a step can choose; 0 for a method that chooses none."""
    options = block_options(config)
    if options is None:
        return 0
    return selection_limits(options, _sizes(vllm_config, block_size, num_blocks, static)).max_selected_blocks


def summaries_per_block(config: UcmConfig, specs: Mapping[str, KVCacheSpec]) -> float:
    """Bytes of a block's summaries over the bytes of its keys and values; 0 for a method without summaries."""
    options = block_options(config)
    if options is None:
        return 0.0
    spec = cast("AttentionSpec", next(iter(specs.values())))
    share = summary_share(options, spec.block_size, spec.head_size, spec.dtype.itemsize)
    # those of blocks that are away stay
    return share * (1 + config.memory_mode.away_ratio) if config.memory_mode.enabled else share


def _sizes(vllm_config: VllmConfig, block_size: int, num_blocks: int, static: bool) -> ServerSizes:
    return ServerSizes(
        max_model_len=vllm_config.model_config.max_model_len,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_rows=1 + vllm_config.num_speculative_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        static=static,
    )


def _tail_rows(config: UcmConfig, vllm_config: VllmConfig, block_size: int) -> int:
    """Rows of a prompt's tail that choose together, which only follows a partial load; 0 where there is none."""
    if not config.memory_mode.enabled or not loads_partly(vllm_config):
        return 0
    max_num_batched_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    return tail_rows(block_size, max_num_batched_tokens, 1 + vllm_config.num_speculative_tokens)


def _query_heads(vllm_config: VllmConfig) -> int:
    return next(cast("UnifiedAttentionImpl", layer.impl).num_heads for layer in attention_layers(vllm_config).values())


def _layers(vllm_config: VllmConfig, kv_caches: Mapping[str, torch.Tensor]) -> dict[str, SelectionLayer]:
    """The layers in the model's order, which is the order they register in; tells each its place."""
    layers = {}
    # a draft model's layers stand behind the target's, and are dense
    target = (item for item in attention_layers(vllm_config).items() if not is_draft_layer(item[0]))
    for index, (name, layer) in enumerate(target):
        implementation = cast("UnifiedAttentionImpl", layer.impl)
        implementation.layer_index = index
        keys, _ = split_key_value(kv_caches[name], implementation.head_size)
        layers[name] = SelectionLayer(keys, implementation.scale)
    return layers
