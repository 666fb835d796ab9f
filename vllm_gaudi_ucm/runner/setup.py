"""Where a worker's objects are made, once its model is loaded and the size of its KV cache is known."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.batch.group_planner import make_planner
from vllm_gaudi_ucm.batch.request_table import RequestTable
from vllm_gaudi_ucm.connector.transfer_config import OURS
from vllm_gaudi_ucm.device.step_activity import STEPS
from vllm_gaudi_ucm.distributed.ranks import Ranks
from vllm_gaudi_ucm.execution.bucket_choice import choose_buckets, reads_own_blocks, server_limits, step_memory
from vllm_gaudi_ucm.execution.bucketed_execution import remainder_shapes
from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
from vllm_gaudi_ucm.execution.decoder import Decoder
from vllm_gaudi_ucm.execution.true_shape_execution import TrueShapeExecution
from vllm_gaudi_ucm.kv_cache.allocation import allocate_kv_cache, bind_kv_caches
from vllm_gaudi_ucm.kv_cache.pair import distinct, in_blocks
from vllm_gaudi_ucm.memory.host_slots import engine_block_bytes
from vllm_gaudi_ucm.memory.memory_worker import MemoryWorker
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.ops.registry import has_folders
from vllm_gaudi_ucm.runner.kv_groups import layer_groups
from vllm_gaudi_ucm.runner.kv_transfer import KvTransfer
from vllm_gaudi_ucm.runner.proposer_setup import make_proposer
from vllm_gaudi_ucm.runner.sparse_setup import make_sparse_worker
from vllm_gaudi_ucm.runner.static_shapes import StaticShapes
from vllm_gaudi_ucm.runner.step_check import StepCheck
from vllm_gaudi_ucm.runner.step_runner import StepRunner
from vllm_gaudi_ucm.runner.steps_ahead import StepsAhead
from vllm_gaudi_ucm.sampling.prompt_logprobs import PromptLogprobs
from vllm_gaudi_ucm.sampling.sampling import NanCounter, SamplingBatch, SlotSampler, TokenSampler, VllmSampler
from vllm_gaudi_ucm.speculation.drafts_ahead import DraftsAhead
from vllm_gaudi_ucm.speculation.verification import Verification
from vllm_gaudi_ucm.vllm_api.cache_options import tile_of_slots
from vllm_gaudi_ucm.vllm_api.engine_process import is_worker_process
from vllm_gaudi_ucm.vllm_api.sampling import Sampler

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.attention.groups import LayerGroups
    from vllm_gaudi_ucm.config.sections import AttentionConfig
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.execution.cpu.native_graphs import NativeGraphs
    from vllm_gaudi_ucm.execution.execution import Execution
    from vllm_gaudi_ucm.execution.graph_kind import GraphKind
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler
    from vllm_gaudi_ucm.kv_cache.pair import LayerCache
    from vllm_gaudi_ucm.observability.phase_log import PhaseLog
    from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheConfig


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, and what the engine wants of it.

    vllm_config, config: the engine's, and the plugin's own.
    device, tensors_on: where model and KV cache live.
    kind: of the graphs; `off` runs steps at their true shapes.
    decoder, draft_decoder: the model, and the draft model where drafts come from one.
    memory_budget: bytes that graphs may take; None: no bound.
    compiler: of the decoders' regions; None: they are not compiled.
    ranks: all workers of the engine, of which this is one.
    """

    vllm_config: VllmConfig
    config: UcmConfig
    device: Device
    tensors_on: torch.device
    kind: GraphKind
    decoder: Decoder
    draft_decoder: Decoder | None
    memory_budget: int | None
    compiler: StaticCompiler | None
    ranks: Ranks

    @property
    def by_token(self) -> bool:
        """Whether each token has a slot of its own."""
        return self.config.kv_cache.granularity == "token"

    @property
    def attention(self) -> AttentionConfig:
        """With a slot for each token several rows may use one block, so none is read by its place in the cache."""
        given = self.config.attention
        return given.model_copy(update={"contiguous_pa": False}) if self.by_token else given


@dataclass(frozen=True)
class WorkerParts:
    """What a worker computes steps with. None: it is switched off.

    kv_caches: by layer name.
    """

    block_size: int
    kv_caches: dict[str, LayerCache]
    requests: RequestTable
    transfer: KvTransfer | None
    sparse: SparseWorker | None
    static: StaticShapes | None
    steps: StepRunner

    def close(self) -> None:
        """Ends a warm-up that is still going on, moves of KV offload, transfers of KV, and copies to host memory."""
        for part in (self.static, self.sparse, self.transfer, self.steps.memory):
            if part is not None:
                part.close()


def make_parts(
    model: LoadedModel,
    sampling: SamplingBatch,
    kv_cache_config: KVCacheConfig,
    phase_log: PhaseLog,
    metrics: StepMetrics,
) -> WorkerParts:
    """Allocates the KV cache, hands each layer its own, and makes what depends on the number of blocks.

    Where something raises, what was made before it is closed.

    Args:
        model: that was loaded.
        sampling: slots of the requests that yield tokens.
        kv_cache_config: vLLM's, in blocks as attention reads them.
        phase_log, metrics: take every step.
    """
    groups = layer_groups(kv_cache_config.kv_cache_groups, model.vllm_config)
    draft_groups = layer_groups(kv_cache_config.kv_cache_groups, model.vllm_config, of_draft_model=True)
    block_size, num_blocks = groups.groups[0].block_size, kv_cache_config.num_blocks
    vllm_config, config, is_static = model.vllm_config, model.config, model.kind != "off"
    model_config = vllm_config.model_config
    with ExitStack() as undo:
        transfer = _make_transfer(model, kv_cache_config)
        if transfer is not None:
            undo.callback(transfer.close)
        kv_caches = _allocate(model, kv_cache_config, transfer)
        max_num_seqs, max_model_len = vllm_config.scheduler_config.max_num_seqs, model_config.max_model_len
        sizes, drafted = (max_num_seqs, max_model_len, block_size), draft_groups.groups
        requests = RequestTable(*sizes, by_token=model.by_token, groups=groups.groups, draft_groups=drafted)
        sparse = make_sparse_worker(
            config,
            vllm_config,
            kv_caches,
            block_size,
            num_blocks,
            static=is_static,
            table=requests,
            transfer=transfer,
            metrics=metrics,
            ranks=model.ranks,
        )
        if sparse is not None:
            undo.callback(sparse.close)
        if transfer is not None:
            transfer.report_to(metrics)
        sampler = Sampler(model_config.logprobs_mode, model_config.use_fp64_gumbel)
        host = HostWork(metrics.host_read, metrics.host_stage)
        carried, drafts = None, None
        if vllm_config.scheduler_config.async_scheduling:
            carried = CarriedTokens(max_num_seqs * max(1, vllm_config.num_speculative_tokens), model.tensors_on)
            drafts = None if vllm_config.speculative_config is None else DraftsAhead(carried, host)
        static = None
        if is_static:
            refill = partial(_refill, kv_caches, sparse)
            static = _make_static(model, groups, draft_groups, num_blocks, metrics, sparse, refill, host, carried)
            undo.callback(static.close)
            static.divided_logits.reserve(vllm_config.num_speculative_tokens)
            if sparse is not None and model.device.kind == "hpu":
                # kernels elsewhere skip pads
                sparse.send_buckets(static.execution.ready.buckets)
        calls_layers = transfer is not None and transfer.in_layers
        execution, token_sampler = _make_execution(model, groups, metrics, sparse, static, calls_layers, carried)
        nans = NanCounter(sampling, host if is_static else None)
        slot_sampler = SlotSampler(sampling, token_sampler, requests, nans.count)
        # where there is a connector, each worker tells what it has moved
        asked = model.ranks.reports or transfer is not None
        steps = StepRunner(
            requests,
            sampling,
            # with asynchronous scheduling two batches are in flight, too, but of the same requests
            make_planner(
                groups.groups,
                config.attention.causal_slice,
                batches=vllm_config.parallel_config.pipeline_parallel_size,
            ),
            execution,
            slot_sampler,
            PromptLogprobs(
                execution,
                sampler,
                model_config.get_vocab_size(),
                as_logits=model_config.logprobs_mode.endswith("logits"),
                host=host if is_static else None,
            ),
            nans,
            phase_log,
            metrics,
            block_size,
            static,
            transfer,
            sparse,
            make_proposer(
                vllm_config,
                model.attention,
                model.draft_decoder,
                requests,
                block_size,
                model.tensors_on,
                host,
                static,
                _native_graphs(model, model.draft_decoder, metrics, calls_layers),
                carried,
                drafts,
                draft_groups,
            ),
            None if vllm_config.speculative_config is None else Verification(slot_sampler, host),
            _make_memory(model, kv_cache_config, kv_caches, block_size, metrics, requests, sparse),
            _make_check(model),
            host,
            model.decoder.has_logits,
            None
            if carried is None
            else StepsAhead(requests, carried, host, static, drafts, asked, is_worker_process()),
            model.decoder.lockstep,
        )
        undo.pop_all()
    return WorkerParts(block_size, kv_caches, requests, transfer, sparse, static, steps)


def _make_check(model: LoadedModel) -> StepCheck | None:
    if model.ranks.size == 1 or not model.config.distributed.check_ranks:
        return None
    return StepCheck(model.ranks, Ranks.of_layer())


def _make_transfer(model: LoadedModel, kv_cache_config: KVCacheConfig) -> KvTransfer | None:
    transfer_config = model.vllm_config.kv_transfer_config
    if transfer_config is None:
        return None
    # latent attention is a layer of ours, which calls no connector
    latent = any(decoder is not None and decoder.latent for decoder in (model.decoder, model.draft_decoder))
    in_layers = model.kind == "off" and transfer_config.kv_connector != OURS and not latent
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


def _make_memory(
    model: LoadedModel,
    kv_cache_config: KVCacheConfig,
    kv_caches: dict[str, LayerCache],
    block_size: int,
    metrics: StepMetrics,
    requests: RequestTable,
    sparse: SparseWorker | None,
) -> MemoryWorker | None:
    """None where the scheduler has no orders."""
    config = model.config
    admits, swaps = config.scheduler.admission != "greedy", config.preemption.swaps
    if not admits and not swaps and not any(config.kv_cache.switches.values()):
        return None
    summaries: list[torch.Tensor] = []
    followers = [requests.moved]
    if sparse is not None and sparse.selector is not None and sparse.state is not None:
        summaries = sparse.selector.summaries
        followers.append(sparse.state.summaries.moved)
    slots = _host_slots(model, kv_cache_config, kv_caches, block_size) if swaps else None
    series, least = metrics.memory(), model.ranks.least
    memory = MemoryWorker(kv_caches, block_size, model.device, series, least, slots, summaries, followers)
    memory.warm_up()
    return memory


def _host_slots(
    model: LoadedModel, kv_cache_config: KVCacheConfig, kv_caches: dict[str, LayerCache], block_size: int
) -> int:
    """As many as the scheduler counts."""
    caches = distinct(kv_caches.values())
    block_bytes = sum(blocks[0].nbytes for pair in caches for blocks in in_blocks(pair, block_size))
    engine_bytes = engine_block_bytes(block_bytes, kv_cache_config.kv_cache_groups, model.vllm_config)
    return model.config.preemption.host_memory // engine_bytes


def _make_execution(
    model: LoadedModel,
    kv_groups: LayerGroups,
    metrics: StepMetrics,
    sparse: SparseWorker | None,
    static: StaticShapes | None,
    calls_layers: bool,
    carried: CarriedTokens | None,
) -> tuple[Execution, TokenSampler]:
    """What runs and what samples steps, by the kind of graphs."""
    if static is not None:
        return static.execution, static.sampler
    graphs, model_config = _native_graphs(model, model.decoder, metrics, calls_layers), model.vllm_config.model_config
    block_size = kv_groups.groups[0].block_size
    return TrueShapeExecution(
        model.decoder, model.attention, block_size, model.tensors_on, sparse, graphs, carried=carried, groups=kv_groups
    ), VllmSampler(model_config.logprobs_mode, model_config.use_fp64_gumbel)


def _native_graphs(
    model: LoadedModel, decoder: Decoder | None, metrics: StepMetrics, calls_layers: bool
) -> NativeGraphs | None:
    """Of a decoder's small steps at true shapes, on a CPU.

    Not beside other connectors than ours, which may be called between the layers: a graph runs no Python there. Not
    with several ranks or engines, whose collectives are no native calls.
    """
    on_cpu = model.tensors_on.type == "cpu" and model.kind == "off" and has_folders("cpu")
    if decoder is None or not on_cpu or calls_layers or not model.config.cpu.native_graphs:
        return None
    # of latents, which way new tokens take depends on the parts, and products are no native calls
    if model.ranks.size > 1 or decoder.lockstep is not None or decoder.latent is not None:
        return None
    from vllm_gaudi_ucm.execution.cpu.native_graphs import NativeGraphs

    return NativeGraphs(decoder, metrics.native_graphs())


def _make_static(
    model: LoadedModel,
    kv_groups: LayerGroups,
    draft_groups: LayerGroups,
    num_blocks: int,
    metrics: StepMetrics,
    sparse: SparseWorker | None,
    refill: Callable[[], None],
    host: HostWork,
    carried: CarriedTokens | None,
) -> StaticShapes:
    config, vllm_config, block_size = model.config, model.vllm_config, kv_groups.groups[0].block_size
    if model.by_token:
        # the scheduler bounds the ranges of these
        assert tile_of_slots(vllm_config) == block_size, (tile_of_slots(vllm_config), block_size)
    # a graph has one form, and even with compaction a step may find a block in use that has not moved down yet: a graph
    # that reads a slice would need one that gathers beside it, so `auto` gathers
    contiguous = config.attention.contiguous_pa is True
    choices = None if sparse is None else sparse.limits
    selected, live, rows = 0, 0, 1
    if choices is not None:
        selected, live, rows = choices.max_selected_blocks, choices.room_for_live_blocks, choices.max_rows
    memory = step_memory(vllm_config, config, model.device.kind)
    sizes = block_size, num_blocks, contiguous, config.graphs.max_shared_blocks, selected, memory
    window, own_blocks = kv_groups.groups[0].window, reads_own_blocks(config, model.device.kind)
    limits = server_limits(vllm_config, *sizes, by_token=model.by_token, window=window, own_blocks=own_blocks)
    remainders = remainder_shapes(limits, choices)
    num_remainders = 0 if remainders is None else len(remainders.keys)
    buckets, usage = choose_buckets(config.graphs, vllm_config, limits, model.device, num_remainders, live, rows)
    return StaticShapes(
        model.decoder,
        vllm_config,
        config,
        model.device,
        model.tensors_on,
        model.kind,
        buckets,
        usage,
        metrics,
        host,
        model.memory_budget,
        sparse,
        model.draft_decoder,
        model.compiler,
        refill,
        model.ranks if model.decoder.lockstep is None else model.decoder.lockstep.workers,
        carried,
        kv_groups,
        draft_groups,
    )


def _refill(kv_caches: dict[str, LayerCache], sparse: SparseWorker | None) -> None:
    """As they were made, before any request."""
    for rows in chain.from_iterable(kv_caches.values()):
        rows.zero_()
    if sparse is not None and sparse.selector is not None:
        sparse.selector.refill()
