"""Where a worker's objects are made, once its model is loaded and the size of its KV cache is known."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.batch.batch_plan import SteadyPlanner
from vllm_gaudi_ucm.batch.request_table import RequestTable
from vllm_gaudi_ucm.connector.transfer_config import OURS
from vllm_gaudi_ucm.device.step_activity import STEPS
from vllm_gaudi_ucm.execution.bucket_choice import choose_buckets, server_limits, step_memory
from vllm_gaudi_ucm.execution.bucketed_execution import remainder_shapes
from vllm_gaudi_ucm.execution.decoder import Decoder
from vllm_gaudi_ucm.execution.true_shape_execution import NativeGraphs, TrueShapeExecution
from vllm_gaudi_ucm.kv_cache.allocation import allocate_kv_cache, bind_kv_caches
from vllm_gaudi_ucm.memory.memory_worker import MemoryWorker
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.runner.kv_transfer import KvTransfer
from vllm_gaudi_ucm.runner.sparse_setup import make_sparse_worker
from vllm_gaudi_ucm.runner.static_shapes import StaticShapes
from vllm_gaudi_ucm.runner.step_runner import StepRunner
from vllm_gaudi_ucm.sampling.prompt_logprobs import PromptLogprobs
from vllm_gaudi_ucm.sampling.sampling import NanCounter, SamplingBatch, SlotSampler, TokenSampler, VllmSampler
from vllm_gaudi_ucm.speculation.draft_model import DraftModelProposer
from vllm_gaudi_ucm.speculation.proposer import NgramProposer
from vllm_gaudi_ucm.speculation.verification import Verification
from vllm_gaudi_ucm.vllm_api.sampling import Sampler

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.config.ucm_config import AttentionConfig, UcmConfig
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.execution.execution import Execution
    from vllm_gaudi_ucm.execution.graph_kind import GraphKind
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler
    from vllm_gaudi_ucm.kv_cache.pair import KvPair
    from vllm_gaudi_ucm.observability.phase_log import PhaseLog
    from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker
    from vllm_gaudi_ucm.speculation.proposer import DraftProposer
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
    kv_caches: dict[str, KvPair]
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
        kv_cache_config: vLLM's, with one group, in blocks as attention reads them.
        phase_log, metrics: take every step.
    """
    (group,) = kv_cache_config.kv_cache_groups
    block_size, num_blocks = group.kv_cache_spec.block_size, kv_cache_config.num_blocks
    vllm_config, config, is_static = model.vllm_config, model.config, model.kind != "off"
    model_config = vllm_config.model_config
    with ExitStack() as undo:
        transfer = _make_transfer(model, kv_cache_config)
        if transfer is not None:
            undo.callback(transfer.close)
        kv_caches = _allocate(model, kv_cache_config, transfer)
        max_num_seqs, max_model_len = vllm_config.scheduler_config.max_num_seqs, model_config.max_model_len
        requests = RequestTable(max_num_seqs, max_model_len, block_size, by_token=model.by_token)
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
        )
        if sparse is not None:
            undo.callback(sparse.close)
        if transfer is not None:
            transfer.report_to(metrics)
        sampler = Sampler(model_config.logprobs_mode, model_config.use_fp64_gumbel)
        host = HostWork(metrics.host_read, metrics.host_stage)
        static = None
        if is_static:
            refill = partial(_refill, kv_caches, sparse)
            static = _make_static(model, block_size, num_blocks, metrics, sparse, refill, host)
            undo.callback(static.close)
            static.divided_logits.reserve(vllm_config.num_speculative_tokens)
        calls_layers = transfer is not None and transfer.in_layers
        execution, token_sampler = _make_execution(model, block_size, metrics, sampler, sparse, static, calls_layers)
        nans = NanCounter(sampling, host if is_static else None)
        slot_sampler = SlotSampler(sampling, token_sampler, requests, nans.count)
        steps = StepRunner(
            requests,
            sampling,
            SteadyPlanner(block_size, config.attention.causal_slice),
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
            ),
            None if vllm_config.speculative_config is None else Verification(slot_sampler, host),
            _make_memory(config, kv_caches, block_size, model.device, metrics, requests, sparse),
            host,
        )
        undo.pop_all()
    return WorkerParts(block_size, kv_caches, requests, transfer, sparse, static, steps)


def _make_transfer(model: LoadedModel, kv_cache_config: KVCacheConfig) -> KvTransfer | None:
    transfer_config = model.vllm_config.kv_transfer_config
    if transfer_config is None:
        return None
    in_layers = model.kind == "off" and transfer_config.kv_connector != OURS
    return KvTransfer(model.vllm_config, kv_cache_config, in_layers)


def _allocate(model: LoadedModel, kv_cache_config: KVCacheConfig, transfer: KvTransfer | None) -> dict[str, KvPair]:
    """The cache, known to the layers and to a KV connector."""
    with nullcontext() if transfer is None else transfer.allocation():
        kv_caches = allocate_kv_cache(kv_cache_config, model.tensors_on, STEPS.is_idle)
    bind_kv_caches(model.vllm_config, kv_caches)
    if transfer is not None:
        transfer.register(kv_caches)
    return kv_caches


def _make_memory(
    config: UcmConfig,
    kv_caches: dict[str, KvPair],
    block_size: int,
    device: Device,
    metrics: StepMetrics,
    requests: RequestTable,
    sparse: SparseWorker | None,
) -> MemoryWorker | None:
    """None where the scheduler has no orders."""
    preemption, admits = config.preemption, config.scheduler.admission != "greedy"
    if not admits and not preemption.swaps and not any(config.kv_cache.switches.values()):
        return None
    summaries: list[torch.Tensor] = []
    followers = [requests.moved]
    if sparse is not None and sparse.selector is not None and sparse.state is not None:
        summaries = sparse.selector.summaries
        followers.append(sparse.state.summaries.moved)
    host_memory = preemption.host_memory if preemption.swaps else None
    memory = MemoryWorker(kv_caches, block_size, device, metrics.memory(), host_memory, summaries, followers)
    memory.warm_up()
    return memory


def _make_execution(
    model: LoadedModel,
    block_size: int,
    metrics: StepMetrics,
    sampler: Sampler,
    sparse: SparseWorker | None,
    static: StaticShapes | None,
    calls_layers: bool,
) -> tuple[Execution, TokenSampler]:
    """What runs and what samples steps, by the kind of graphs."""
    if static is not None:
        return static.execution, static.sampler
    graphs = _native_graphs(model, model.decoder, metrics, calls_layers)
    return TrueShapeExecution(
        model.decoder, model.attention, block_size, model.tensors_on, sparse, graphs
    ), VllmSampler(sampler)


def _native_graphs(
    model: LoadedModel, decoder: Decoder | None, metrics: StepMetrics, calls_layers: bool
) -> NativeGraphs | None:
    """Of a decoder's small steps at true shapes, on a CPU.

    Not beside other connectors than ours, which may be called between the layers: a graph runs no Python there.
    """
    on_cpu = model.tensors_on.type == "cpu" and model.kind == "off"
    if decoder is None or not on_cpu or calls_layers or not model.config.cpu.native_graphs:
        return None
    return NativeGraphs(decoder, metrics.native_graphs())


def _make_static(
    model: LoadedModel,
    block_size: int,
    num_blocks: int,
    metrics: StepMetrics,
    sparse: SparseWorker | None,
    refill: Callable[[], None],
    host: HostWork,
) -> StaticShapes:
    config, vllm_config = model.config, model.vllm_config
    # a graph has one form, and even with compaction a step may find a block in use that has not moved down yet: a graph
    # that reads a slice would need one that gathers beside it, so `auto` gathers
    contiguous = config.attention.contiguous_pa is True
    choices = None if sparse is None else sparse.limits
    selected = 0 if choices is None else choices.max_selected_blocks
    shared = config.graphs.max_shared_blocks
    memory = step_memory(vllm_config, config, model.device.kind)
    limits = server_limits(vllm_config, block_size, num_blocks, contiguous, shared, selected, memory)
    remainders = remainder_shapes(limits, choices)
    num_remainders = 0 if remainders is None else len(remainders.keys)
    buckets, usage = choose_buckets(config.graphs, vllm_config, limits, model.device, num_remainders)
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
    )


def _refill(kv_caches: dict[str, KvPair], sparse: SparseWorker | None) -> None:
    """As they were made, before any request."""
    for rows in chain.from_iterable(kv_caches.values()):
        rows.zero_()
    if sparse is not None and sparse.selector is not None:
        sparse.selector.refill()


def make_proposer(
    vllm_config: VllmConfig,
    attention: AttentionConfig,
    draft_model: Decoder | None,
    table: RequestTable,
    block_size: int,
    device: torch.device,
    host: HostWork,
    static: StaticShapes | None = None,
    graphs: NativeGraphs | None = None,
) -> DraftProposer | None:
    """None without speculative decoding; features.py lets no other method pass.

    Args:
        vllm_config: the engine's.
        attention: kernels of a draft model, the target's.
        draft_model: where the method has one.
        table: the requests.
        block_size: tokens per cache block.
        device: where the draft model runs.
        host: counts what is waited for, and what runs on the host.
        static: the engine's static shapes with the draft model's graphs; None: steps run at true shapes.
        graphs: of the draft model's steps at true shapes, on a CPU.
    """
    config = vllm_config.speculative_config
    if config is None:
        return None
    if draft_model is not None:
        longest = config.draft_model_config.max_model_len
        if static is None:
            execution = TrueShapeExecution(draft_model, attention, block_size, device, graphs=graphs)
            return DraftModelProposer(execution, table, block_size, longest)
        return _draft_model_at_static_shapes(static, table, block_size, longest, host)
    assert config.prompt_lookup_min is not None
    assert config.prompt_lookup_max is not None
    return NgramProposer(table, config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max, host)


def _draft_model_at_static_shapes(
    static: StaticShapes, table: RequestTable, block_size: int, max_model_len: int, host: HostWork
) -> DraftModelProposer:
    graphs = static.draft_model
    assert graphs is not None, "static shapes without the draft model"

    def divided() -> None:
        static.bypassed("pass of the draft model divided: more shared blocks than ucm.graphs.max_shared_blocks")

    return DraftModelProposer(graphs.execution, table, block_size, max_model_len, graphs.likeliest, divided, host)
