"""Makes a worker's objects, once its model is loaded and the size of its KV cache is known."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.batch.request_table import DraftModelRows, RequestTable
from vllm_gaudi_ucm.config.exclusions import policies_give_orders
from vllm_gaudi_ucm.connector.transfer_config import BETWEEN_STEPS
from vllm_gaudi_ucm.decisions.bucket_choice import choose_buckets, reads_own_blocks, server_limits, step_memory
from vllm_gaudi_ucm.device.step_activity import STEPS
from vllm_gaudi_ucm.execution.bucketed_execution import remainder_shapes
from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
from vllm_gaudi_ucm.execution.state_group import StateGroup
from vllm_gaudi_ucm.kv_cache.allocation import allocate_kv_cache, bind_kv_caches
from vllm_gaudi_ucm.kv_cache.pair import LayerCache, distinct, in_blocks
from vllm_gaudi_ucm.memory.memory_worker import MemoryWorker
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.observability.room_metrics import MemoryMetrics
from vllm_gaudi_ucm.runner.kv_groups import layer_groups
from vllm_gaudi_ucm.runner.kv_transfer import KvTransfer
from vllm_gaudi_ucm.runner.loaded_model import AllocatedModel, LoadedModel
from vllm_gaudi_ucm.runner.other_groups import allocate_others, refuse_uneven_stages
from vllm_gaudi_ucm.runner.parts import StepRecords
from vllm_gaudi_ucm.runner.static_shapes import StaticShapes
from vllm_gaudi_ucm.speculation.drafts_ahead import DraftsAhead
from vllm_gaudi_ucm.start.sparse_setup import make_sparse_worker
from vllm_gaudi_ucm.start.step_setup import StepObjects, make_steps
from vllm_gaudi_ucm.vllm_api.cache_options import tile_of_slots
from vllm_gaudi_ucm.vllm_api.stage_layers import engine_block_bytes

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_ucm.execution.layer_groups import LayerGroups
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.observability.phase_log import PhaseLog
    from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
    from vllm_gaudi_ucm.runner.drafts import Drafts
    from vllm_gaudi_ucm.runner.step_runner import StepRunner
    from vllm_gaudi_ucm.runner.steps_ahead import StepsAhead
    from vllm_gaudi_ucm.sampling.sampling import SamplingBatch
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker
    from vllm_gaudi_ucm.speculation.verification import Verification
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheConfig


class KeptParts(NamedTuple):
    """Objects of earlier parts of the same model that go on. kv_caches: None if they were given back."""

    requests: RequestTable
    kv_caches: dict[str, LayerCache] | None = None


@dataclass(frozen=True)
class WorkerParts:
    """The objects that compute a worker's steps. None: it is switched off.

    kv_caches: by layer name.
    """

    block_size: int
    kv_caches: dict[str, LayerCache]
    requests: RequestTable
    transfer: KvTransfer | None
    sparse: SparseWorker | None
    static: StaticShapes | None
    memory: MemoryWorker | None
    ahead: StepsAhead | None
    drafts: Drafts
    verification: Verification | None
    records: StepRecords
    steps: StepRunner

    def close(self) -> None:
        """Ends a warm-up that is still going on, moves of KV offload, transfers of KV, and copies to host memory."""
        self.steps.close()


def make_parts(
    model: LoadedModel,
    sampling: SamplingBatch,
    kv_cache_config: KVCacheConfig,
    phase_log: PhaseLog,
    metrics: StepMetrics,
    kept: KeptParts | None = None,
) -> WorkerParts:
    """Allocates the KV cache, gives each layer its part, and makes the objects that depend on the number of blocks.

    After an exception, the objects made before it are closed.

    Args:
        sampling: slots of the requests that yield tokens.
        kv_cache_config: vLLM's, in blocks as attention reads them.
        phase_log, metrics: take every step.
        kept: objects of earlier parts that go on.
    """
    with ExitStack() as undo:
        allocated = _make_allocated(model, kv_cache_config, metrics, undo, kept)
        static = None if model.kind == "off" else make_static(allocated)
        if static is not None:
            undo.callback(static.close)
        memory = make_memory(allocated)
        if memory is not None:
            undo.callback(memory.close)
        records = StepRecords(phase_log, metrics, allocated.host, allocated.block_size)
        steps: StepObjects = make_steps(allocated, sampling, static, memory, records)
        undo.pop_all()
    return WorkerParts(
        block_size=allocated.block_size,
        kv_caches=allocated.kv_caches,
        requests=allocated.requests,
        transfer=allocated.transfer,
        sparse=allocated.sparse,
        static=static,
        memory=memory,
        ahead=steps.ahead,
        drafts=steps.drafts,
        verification=steps.verification,
        records=records,
        steps=steps.runner,
    )


def _make_allocated(
    model: LoadedModel,
    kv_cache_config: KVCacheConfig,
    metrics: StepMetrics,
    undo: ExitStack,
    kept: KeptParts | None,
) -> AllocatedModel:
    """Makes the objects of an allocated cache. undo: closes them. kept: see `make_parts`."""
    groups = layer_groups(kv_cache_config.kv_cache_groups, model.vllm_config)
    refuse_uneven_stages(groups, model.ranks)
    draft_groups = layer_groups(kv_cache_config.kv_cache_groups, model.vllm_config, of_draft_model=True)
    block_size, vllm_config = groups.kv[0].block_size, model.vllm_config
    transfer = _make_transfer(model, kv_cache_config)
    if transfer is not None:
        undo.callback(transfer.close)
    if kept is None or kept.kv_caches is None:
        kv_caches = _allocate(model, kv_cache_config, transfer)
    else:
        kv_caches = kept.kv_caches
        bind_kv_caches(vllm_config, kv_caches)
    allocate_others(groups, vllm_config, kv_cache_config.num_blocks, model.tensors_on)
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    requests = _make_table(model, groups, draft_groups) if kept is None else kept.requests
    requests.follow(one for one in (group.follows_requests for group in groups.groups) if one is not None)
    sparse = make_sparse_worker(
        model.config,
        vllm_config,
        kv_caches,
        block_size,
        kv_cache_config.num_blocks,
        static=model.kind != "off",
        table=requests,
        transfer=transfer,
        metrics=metrics,
        ranks=model.ranks,
    )
    if sparse is not None:
        undo.callback(sparse.close)
    if transfer is not None:
        transfer.report_to(metrics)
    host = HostWork(metrics.host_read, metrics.host_stage)
    carried, drafts_ahead = None, None
    if vllm_config.scheduler_config.async_scheduling:
        carried = CarriedTokens(max_num_seqs * max(1, vllm_config.num_speculative_tokens), model.tensors_on)
        drafts_ahead = None if vllm_config.speculative_config is None else DraftsAhead(carried, host)
    return AllocatedModel(
        model=model,
        kv_cache_config=kv_cache_config,
        kv_caches=kv_caches,
        groups=groups,
        draft_groups=draft_groups,
        requests=requests,
        transfer=transfer,
        sparse=sparse,
        metrics=metrics,
        host=host,
        carried=carried,
        drafts_ahead=drafts_ahead,
    )


def _make_table(model: LoadedModel, groups: LayerGroups, draft_groups: LayerGroups) -> RequestTable:
    head = model.draft_decoder
    inputs, reads_next = ((), 0) if head is None else (head.inputs, int(head.states is not None))
    return RequestTable(
        model.vllm_config.scheduler_config.max_num_seqs,
        model.vllm_config.model_config.max_model_len,
        groups.kv[0].block_size,
        by_token=model.by_token,
        groups=groups.kv,
        inputs=model.decoder.inputs,
        draft=DraftModelRows(draft_groups.kv, inputs, reads_next),
    )


def _make_transfer(model: LoadedModel, kv_cache_config: KVCacheConfig) -> KvTransfer | None:
    transfer_config = model.vllm_config.kv_transfer_config
    if transfer_config is None:
        return None
    # latent attention is a layer of ours, which calls no connector
    latent = any(decoder is not None and decoder.latent for decoder in (model.decoder, model.draft_decoder))
    in_layers = model.kind == "off" and transfer_config.kv_connector not in BETWEEN_STEPS and not latent
    ahead = model.vllm_config.scheduler_config.async_scheduling
    return KvTransfer(model.vllm_config, kv_cache_config, in_layers, model.ranks, ahead=bool(ahead))


def _allocate(model: LoadedModel, kv_cache_config: KVCacheConfig, transfer: KvTransfer | None) -> dict[str, LayerCache]:
    """The cache, known to the layers and to a KV connector."""
    with nullcontext() if transfer is None else transfer.allocation():
        kv_caches = allocate_kv_cache(kv_cache_config, model.tensors_on, STEPS.is_idle)
    bind_kv_caches(model.vllm_config, kv_caches)
    if transfer is not None:
        transfer.register(kv_caches)
    return kv_caches


def make_static(allocated: AllocatedModel) -> StaticShapes:
    """Makes static shapes for a model with a KV cache, and room for the logits of divided steps."""
    model, sparse = allocated.model, allocated.sparse
    limits, choices = _limits(allocated), None if sparse is None else sparse.limits
    remainders = remainder_shapes(limits, choices)
    buckets, usage = choose_buckets(
        model.config.graphs,
        model.vllm_config,
        limits,
        model.device,
        num_remainders=0 if remainders is None else len(remainders.keys),
        live_blocks=0 if choices is None else choices.room_for_live_blocks,
        rows_each=1 + model.vllm_config.num_speculative_tokens,
    )
    static = StaticShapes(allocated, buckets, usage, partial(_refill, allocated))
    static.divided_logits.reserve(model.vllm_config.num_speculative_tokens)
    if sparse is not None and model.device.kind == "hpu":
        # kernels on other devices skip pads
        sparse.send_buckets(static.execution.ready.buckets)
    return static


def _limits(allocated: AllocatedModel) -> Limits:
    model, block_size = allocated.model, allocated.block_size
    config, vllm_config, sparse = model.config, model.vllm_config, allocated.sparse
    if model.by_token:
        # the scheduler bounds the ranges of these
        assert tile_of_slots(vllm_config) == block_size, (tile_of_slots(vllm_config), block_size)
    return server_limits(
        vllm_config,
        block_size,
        allocated.kv_cache_config.num_blocks,
        # a graph has one form, and even with compaction a step may find a block in use that has not moved down yet: a
        # graph that reads a slice would need a second one that gathers, so `auto` gathers
        config.attention.contiguous_pa is True,
        config.graphs.max_shared_blocks,
        0 if sparse is None or sparse.limits is None else sparse.limits.max_selected_blocks,
        memory=step_memory(vllm_config, config, model.device.kind),
        by_token=model.by_token,
        window=allocated.groups.kv[0].window,
        own_blocks=reads_own_blocks(config, model.device.kind),
    )


def _refill(allocated: AllocatedModel) -> None:
    """Resets tensors to their initial values, before any request."""
    sparse = allocated.sparse
    for rows in chain.from_iterable(allocated.kv_caches.values()):
        rows.zero_()
    for group in allocated.groups.groups:
        group.refill()
    if allocated.model.decoder.states is not None:
        allocated.model.decoder.states.refill()
    if sparse is not None and sparse.selector is not None:
        sparse.selector.refill()


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
    memory.warm_up(sum(group.bytes_of_request for group in allocated.groups.groups if isinstance(group, StateGroup)))
    return memory


def _host_slots(allocated: AllocatedModel) -> int:
    """Returns the same number of host slots as the scheduler counts."""
    caches, vllm_config = distinct(allocated.kv_caches.values()), allocated.model.vllm_config
    block_bytes = sum(blocks[0].nbytes for pair in caches for blocks in in_blocks(pair, allocated.block_size))
    engine_bytes = engine_block_bytes(block_bytes, allocated.kv_cache_config.kv_cache_groups, vllm_config)
    return allocated.model.config.preemption.host_memory // engine_bytes
