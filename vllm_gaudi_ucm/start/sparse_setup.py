"""Makes a worker's objects for a sparse method and for KV offload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionImpl
from vllm_gaudi_ucm.config.ucm_config import UcmConfig, block_options, memory_mode_prefetch
from vllm_gaudi_ucm.connector.transfer_config import loads_partly
from vllm_gaudi_ucm.device import Device, get_device
from vllm_gaudi_ucm.distributed.rank_mean import RankMean
from vllm_gaudi_ucm.distributed.ranks import ALONE, Ranks
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import remainder_rows
from vllm_gaudi_ucm.kv_cache.allocation import attention_layers, other_specs
from vllm_gaudi_ucm.kv_cache.device_blocks import DeviceBlocks
from vllm_gaudi_ucm.kv_cache.pair import LayerCache, in_blocks
from vllm_gaudi_ucm.memory_mode.copies import CopyFolder, CopyStore
from vllm_gaudi_ucm.memory_mode.worker_side import OffloadWorker, StoredCopies
from vllm_gaudi_ucm.observability.room_metrics import MemoryModeMetrics, SparseMetrics
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError, UnsupportedFeatureError
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.late_decisions import LateDecisions, decides_late
from vllm_gaudi_ucm.sparse.selection.block_selector import KeptQueries, SelectionLayer
from vllm_gaudi_ucm.sparse.selection.sparse_worker import (
    BlockSelection,
    LayerPlace,
    ServerSizes,
    SparseWorker,
    selection_limits,
    summary_share,
)
from vllm_gaudi_ucm.speculation.draft_model import is_draft_layer
from vllm_gaudi_ucm.store.factory import open_medium, open_store
from vllm_gaudi_ucm.store.file import FileStoreOptions
from vllm_gaudi_ucm.vllm_api.kv_cache import AttentionSpec, KVCacheSpec, groups_of
from vllm_gaudi_ucm.vllm_api.model import extract_layer_index, has_attention

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
    from vllm_gaudi_ucm.runner.kv_transfer import KvTransfer
    from vllm_gaudi_ucm.sparse.options import BlockOptions
    from vllm_gaudi_ucm.store.base import KvStore


def offload_worker(
    config: UcmConfig,
    selection: BlockSelection,
    table: RequestTable,
    blocks: DeviceBlocks,
    num_rows: int,
    device: Device,
    stored: StoredCopies | None,
    metrics: StepMetrics | None,
    ranks: Ranks,
) -> OffloadWorker:
    """Makes the worker's side of KV offload.

    Args:
        selection: the method's selection, which keeps queries.
        num_rows: blocks that can have a copy.
        stored: brings back blocks whose copy is a connector's record.
        ranks: the ranks that have a part of each block.
    """
    scorer = selection.selector.scorer
    assert scorer is not None, "made with the queries that it keeps"
    copies = open_copies(config, num_rows, blocks, metrics)
    series = None if metrics is None else MemoryModeMetrics(metrics.file)
    worker = OffloadWorker(table, selection.state, scorer, blocks, copies, stored=stored, metrics=series, ranks=ranks)
    worker.warm_up()
    return worker


def open_copies(
    config: UcmConfig, num_rows: int, blocks: DeviceBlocks, metrics: StepMetrics | None = None
) -> CopyStore:
    """Opens the store of copies: used only by this engine, and never evicting.

    Raises UcmConfigError for a folder that cannot be used, or a capacity below one block.
    """
    options, block_bytes = config.memory_mode.open_options(num_rows, blocks.block_bytes), blocks.block_bytes
    folder: CopyFolder | None = None
    store: KvStore | None = None
    try:
        if isinstance(options, FileStoreOptions):
            folder = _own_folder(options)
            options = options.model_copy(update={"path": folder.path})
        # never a connector's store in this process, because it evicts and copies must stay
        store = open_store(options, block_bytes, evicts=False)
        return CopyStore(store, block_bytes, blocks.allocate, memory_mode_prefetch(config), folder, metrics)
    except BaseException:
        if store is not None:
            store.close()
        if folder is not None:
            folder.remove()
        raise


def _own_folder(options: FileStoreOptions) -> CopyFolder:
    try:
        # makes the folder, or refuses one with other content
        open_medium(options).close()
        return CopyFolder(options.path)
    except UcmConfigError as error:
        problems = [replace(problem, key=f"ucm.memory_mode.{problem.key}") for problem in error.problems]
        raise UcmConfigError(problems) from error
    except OSError as error:
        found = f"{options.path} ({error.strerror})"
        wanted = "a folder that this user owns, or may make"
        raise UcmConfigError([Problem("ucm.memory_mode.store.path", found, wanted)]) from error


def make_sparse_worker(
    config: UcmConfig,
    vllm_config: VllmConfig,
    kv_caches: Mapping[str, LayerCache],
    block_size: int,
    num_blocks: int,
    static: bool,
    table: RequestTable | None = None,
    transfer: KvTransfer | None = None,
    metrics: StepMetrics | None = None,
    ranks: Ranks = ALONE,
) -> SparseWorker | None:
    """Makes the worker side of `ucm_sparse_method`; None without one.

    Args:
        kv_caches: by layer name, bound to the layers.
        block_size, num_blocks, static: see ServerSizes.
        table: block tables of the live requests; without it KV offload does not move blocks.
        transfer: a KV connector, which may leave blocks in its store with KV offload.
        ranks: the engine's ranks, which all have the same requests; not needed for measurements.
    """
    if config.ucm_sparse_method is None:
        return None
    method = UcmSparseFactory.create_sparse_method(config.ucm_sparse_method, UcmSparseRole.WORKER, config)
    implementations, place = _choosing(vllm_config)
    numbers = place.numbers or range(place.first, place.first + len(implementations))
    layers = {
        name: SelectionLayer(in_blocks(kv_caches[name], block_size).key, implementation.scale)
        for name, implementation in implementations.items()
    }
    method.register_kv_caches({name: layer.keys for name, layer in layers.items()})
    series = None if metrics is None else SparseMetrics(metrics.file)
    choosing, offloads = method.selecting_method, config.memory_mode.enabled
    late = _make_late_decisions(config.ucm_sparse_method, config, vllm_config, block_size)
    if not isinstance(choosing, BlockSparse):
        if offloads:
            raise ValueError("ucm.memory_mode: found a method that does not choose blocks, expected one that does")
        for number, implementation in zip(numbers, implementations.values(), strict=True):
            implementation.be_sparse(number, None)
        return SparseWorker(method, metrics=series, late=late)
    sharing = vllm_config.parallel_config.tensor_parallel_size
    over_ranks = RankMean(sharing) if sharing > 1 else None
    sizes = _sizes(vllm_config, block_size, num_blocks, static)._replace(
        some_offloaded=offloads,
        # with windows, a connector loads prompts as a whole
        remainder_rows=0 if place.numbers else _remainder_rows(config, vllm_config, block_size),
    )
    if place.numbers and choosing.block_options.prompt_ratio is not None:
        instead = "leave prompt_ratio out: answers still choose blocks"
        raise UnsupportedFeatureError(f"sparse prompts of a model with windows ({instead})", "prompt_ratio")

    on = next(iter(kv_caches.values())).key.device

    def select(kept: KeptQueries | None) -> BlockSelection:
        selection = BlockSelection.from_layers(
            choosing, list(layers.values()), sizes, kept, over_ranks=over_ranks, place=place, device=on
        )
        for number, implementation, layer in zip(
            numbers, implementations.values(), selection.selector.layers, strict=True
        ):
            implementation.be_sparse(number, layer)
        return selection

    if not offloads:
        return SparseWorker(method, select(None), metrics=series, late=late)
    device = get_device(on.type)
    # of layers with windows nothing leaves
    blocks = DeviceBlocks({name: kv_caches[name] for name in implementations}, block_size, device)
    # a cache for measurements has one block only
    num_rows = 1 if table is None else config.memory_mode.max_copies(num_blocks, blocks.block_bytes)
    heads, dtype = _query_heads(vllm_config), cast("torch.dtype", vllm_config.model_config.dtype)
    selection = select(KeptQueries(num_rows, heads, dtype, over_ranks))
    if table is None:
        return SparseWorker(method, selection, metrics=series)
    stored = None if transfer is None else transfer.stored_copies(selection, choosing.block_options)
    offload = offload_worker(
        config, selection, table, blocks, num_rows=num_rows, device=device, stored=stored, metrics=metrics, ranks=ranks
    )
    return SparseWorker(method, selection, offload, series)


def _make_late_decisions(
    name: str, config: UcmConfig, vllm_config: VllmConfig, block_size: int
) -> LateDecisions | None:
    """Makes the late decisions of the method of this name; None if the scheduler decides."""
    if not decides_late(vllm_config):
        return None
    method = UcmSparseFactory.create_sparse_method(name, UcmSparseRole.SCHEDULER, config)
    method.register_block_size(block_size)
    return LateDecisions(method)


def max_selected_blocks(
    config: UcmConfig, vllm_config: VllmConfig, block_size: int, num_blocks: int, static: bool
) -> int:
    """Blocks that all requests of a step can choose; 0 for a method that chooses none."""
    options = block_options(config)
    if options is None:
        return 0
    return selection_limits(options, _sizes(vllm_config, block_size, num_blocks, static)).max_selected_blocks


def summaries_per_block(config: UcmConfig, vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]) -> float:
    """Bytes of a block's summaries over the bytes of its keys and values; 0 for a method without summaries.

    Layers that choose have summaries, by the ids of the pool that all KV-cache groups have; a block has room for the
    layers of any group. specs: of all layers of this worker.
    """
    options = block_options(config)
    if options is None:
        return 0.0
    choosing, _ = _choosing(vllm_config)
    summaries = sum(_summary_bytes(options, cast("AttentionSpec", specs[name])) for name in choosing)
    groups = groups_of(vllm_config, specs)
    share = summaries / max(sum(specs[name].page_size_bytes for name in group.layer_names) for group in groups)
    # summaries of offloaded blocks stay
    return share * (1 + config.memory_mode.offloaded_ratio) if config.memory_mode.enabled else share


def _summary_bytes(options: BlockOptions, spec: AttentionSpec) -> float:
    share = summary_share(options, spec.block_size, spec.head_size, spec.head_size_v, spec.dtype.itemsize)
    return share * spec.unpadded_page_size_bytes


def _sizes(vllm_config: VllmConfig, block_size: int, num_blocks: int, static: bool) -> ServerSizes:
    return ServerSizes(
        max_model_len=vllm_config.model_config.max_model_len,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_rows=1 + vllm_config.num_speculative_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        static=static,
        batch_rows=vllm_config.scheduler_config.max_num_batched_tokens,
    )


def _remainder_rows(config: UcmConfig, vllm_config: VllmConfig, block_size: int) -> int:
    """Returns the rows of the largest prompt remainder: after a partial load, or a chunk with `prompt_ratio`; 0 without
    either.
    """
    options = block_options(config)
    tiles = options is not None and options.prompt_ratio is not None
    if not tiles and not (config.memory_mode.enabled and loads_partly(vllm_config)):
        return 0
    max_num_batched_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    return remainder_rows(block_size, max_num_batched_tokens, 1 + vllm_config.num_speculative_tokens, tiles)


def _query_heads(vllm_config: VllmConfig) -> int:
    return next(iter(_implementations(vllm_config).values())).num_heads


def _implementations(vllm_config: VllmConfig) -> dict[str, UnifiedAttentionImpl]:
    """Returns the implementations of the layers with attention in the model's order, in which they register."""
    # a draft model's layers follow the target's, and are dense
    layers = attention_layers(vllm_config).items()
    return {
        name: cast("UnifiedAttentionImpl", layer.impl)
        for name, layer in layers
        if has_attention(layer) and not is_draft_layer(name)
    }


def _choosing(vllm_config: VllmConfig) -> tuple[dict[str, UnifiedAttentionImpl], LayerPlace]:
    """Returns the layers that see whole contexts, by name, and their places: others have no blocks to choose from."""
    implementations = _implementations(vllm_config)
    first, _ = vllm_config.model_config.get_layers_start_end_indices(vllm_config.parallel_config)
    total = vllm_config.model_config.get_total_num_hidden_layers()
    seeing_all = {name: one for name, one in implementations.items() if one.window is None}
    if other_specs(vllm_config):
        return seeing_all, LayerPlace(first, total, tuple(map(extract_layer_index, seeing_all)))
    if len(seeing_all) == len(implementations):
        return implementations, LayerPlace(first, total)
    numbers = tuple(number for number, name in enumerate(implementations, first) if name in seeing_all)
    return seeing_all, LayerPlace(first, total, numbers)
