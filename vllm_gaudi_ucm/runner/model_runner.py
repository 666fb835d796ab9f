"""What an engine runs on one device: the model, its KV cache, and what turns a scheduler output into tokens."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from vllm_gaudi_ucm.batch.batch_plan import SteadyPlanner
from vllm_gaudi_ucm.batch.request_table import RequestTable
from vllm_gaudi_ucm.connector.transfer_config import OURS
from vllm_gaudi_ucm.device.step_activity import StepActivity
from vllm_gaudi_ucm.execution.bucket_choice import choose_buckets, server_limits
from vllm_gaudi_ucm.execution.bucketed_execution import remainder_shapes
from vllm_gaudi_ucm.execution.decoder import Decoder, DecoderModel
from vllm_gaudi_ucm.execution.execution import Execution
from vllm_gaudi_ucm.execution.graph_kind import GraphKind
from vllm_gaudi_ucm.execution.true_shape_execution import NativeGraphs, TrueShapeExecution
from vllm_gaudi_ucm.kv_cache.allocation import allocate_kv_cache, bind_kv_caches, kv_cache_specs
from vllm_gaudi_ucm.layers.packed_weights import pack_linear_layers
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.observability.phase_log import PhaseLog
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
from vllm_gaudi_ucm.ops.host_memory.api import keep_all_freed_memory
from vllm_gaudi_ucm.ops.native import matrix_unit
from vllm_gaudi_ucm.runner.graph_measurement import GIB, graph_memory_need
from vllm_gaudi_ucm.runner.kv_transfer import KvTransfer
from vllm_gaudi_ucm.runner.setup import make_proposer, make_sparse_worker, refuse_other_layers
from vllm_gaudi_ucm.runner.static_shapes import StaticShapes
from vllm_gaudi_ucm.runner.step_runner import StepRunner
from vllm_gaudi_ucm.sampling.prompt_logprobs import PromptLogprobs
from vllm_gaudi_ucm.sampling.sampling import NanCounter, SamplingBatch, SlotSampler, TokenSampler, VllmSampler
from vllm_gaudi_ucm.speculation.draft_model import load_draft_model
from vllm_gaudi_ucm.speculation.verification import Verification
from vllm_gaudi_ucm.vllm_api.model import get_model
from vllm_gaudi_ucm.vllm_api.sampling import Sampler
from vllm_gaudi_ucm.vllm_api.steps import DraftTokenIds, ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.execution.execution import Execution
    from vllm_gaudi_ucm.observability.phase_log import PhaseLog
    from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheConfig, KVCacheSpec
    from vllm_gaudi_ucm.vllm_api.steps import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput

logger = plugin_logger(__name__)


class ModelRunner:
    """Runs a decoder model on one device, prompts and decodes in one flat batch.

    Args:
        vllm_config: the engine's.
        config: the plugin's own options.
        device: where model and KV cache live.
        kind: of the graphs; `off` runs steps at their true shapes.
    """

    def __init__(self, vllm_config: VllmConfig, config: UcmConfig, device: Device, kind: GraphKind) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._device = device
        self.kind = kind
        self._tensors_on = device.torch_device()
        # at static shapes what a request's parameters decide is computed on the host
        self._sampling = SamplingBatch(vllm_config, self._tensors_on if self.kind == "off" else torch.device("cpu"))
        self._draft_decoder: Decoder | None = None
        self._sparse: SparseWorker | None = None
        self.static: StaticShapes | None = None
        self.transfer: KvTransfer | None = None
        given = config.graphs.memory_budget
        self._memory_budget = None if given is None else int(given * GIB)
        self.decoder: Decoder
        self.requests: RequestTable
        self.steps: StepRunner
        self.kv_caches: dict[str, torch.Tensor] = {}
        self._activity = StepActivity()

    def load_model(self) -> None:
        refuse_other_layers(self._vllm_config)
        models = [get_model(vllm_config=self._vllm_config)]
        draft_model = load_draft_model(self._vllm_config)
        if draft_model is not None:
            models.append(draft_model)
        if self._device.kind == "cpu":
            matrix_unit.use(self._config.cpu.matrix_unit)
        if self._device.kind == "cpu" and self._config.cpu.packed_weights and self.kind != "compile":
            for model in models:
                layers = pack_linear_layers(model, self._config.cpu.compact_weights)
                logger.info("Packed %d linear layers, %d of them also in fewer bits", *layers)
        self.decoder, *draft = (Decoder(cast(DecoderModel, model), self._vllm_config) for model in models)
        self._draft_decoder = draft[0] if draft else None
        if self._device.kind == "cpu":
            keep_all_freed_memory()
        if self.kind == "compile":
            for decoder in (self.decoder, *draft):
                decoder.compile("hpu_backend" if self._device.kind == "hpu" else "inductor")

    @property
    def draft_model(self) -> nn.Module | None:
        return None if self._draft_decoder is None else cast(nn.Module, self._draft_decoder.model)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return kv_cache_specs(self._vllm_config)

    @torch.inference_mode()
    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, phase_log: PhaseLog, metrics: StepMetrics) -> None:
        """Allocates the cache, hands each layer its view, and prepares what depends on the final number of blocks.

        phase_log and metrics take every step from now on.
        """
        (group,) = kv_cache_config.kv_cache_groups
        self._block_size = group.kv_cache_spec.block_size
        self._allocate(kv_cache_config)
        model_config = self._vllm_config.model_config
        max_num_seqs = self._vllm_config.scheduler_config.max_num_seqs
        self.requests = RequestTable(max_num_seqs, model_config.max_model_len, self._block_size)
        self._sparse = make_sparse_worker(
            self._config,
            self._vllm_config,
            self.kv_caches,
            self._block_size,
            kv_cache_config.num_blocks,
            static=self.kind != "off",
            table=self.requests,
            transfer=self.transfer,
            metrics=metrics,
        )
        if self.transfer is not None:
            self.transfer.report_to(metrics)
        sampler = Sampler(model_config.logprobs_mode, model_config.use_fp64_gumbel)
        execution, token_sampler = self._make_execution(kv_cache_config, metrics, sampler)
        nans = NanCounter(self._sampling, on_host=self.static is not None)
        proposer = make_proposer(
            self._vllm_config,
            self._config.attention,
            self._draft_decoder,
            self.requests,
            self._block_size,
            self._tensors_on,
            self.static,
            self._native_graphs(self._draft_decoder, metrics),
        )
        prompt_logprobs = PromptLogprobs(
            execution,
            sampler,
            model_config.get_vocab_size(),
            as_logits=model_config.logprobs_mode.endswith("logits"),
            on_host=self.static is not None,
        )
        slot_sampler = SlotSampler(self._sampling, token_sampler, self.requests, nans.count)
        self.steps = StepRunner(
            self.requests,
            self._sampling,
            SteadyPlanner(self._block_size, self._config.attention.causal_slice),
            execution,
            slot_sampler,
            prompt_logprobs,
            nans,
            phase_log,
            metrics,
            self._block_size,
            self.static,
            self.transfer,
            self._sparse,
            proposer,
            None if self._vllm_config.speculative_config is None else Verification(slot_sampler),
        )

    def _allocate(self, kv_cache_config: KVCacheConfig) -> None:
        """The cache, known to the layers and to a KV connector."""
        if self._vllm_config.kv_transfer_config is not None:
            is_ours = self._vllm_config.kv_transfer_config.kv_connector == OURS
            in_layers = self.kind == "off" and not is_ours
            self.transfer = KvTransfer(self._vllm_config, kv_cache_config, in_layers)
        with nullcontext() if self.transfer is None else self.transfer.allocation():
            separate = self.kind == "compile"
            self.kv_caches = allocate_kv_cache(kv_cache_config, self._tensors_on, separate, self._activity.is_idle)
        bind_kv_caches(self._vllm_config, self.kv_caches)
        if self.transfer is not None:
            self.transfer.register(self.kv_caches)

    def _make_execution(
        self, kv_cache_config: KVCacheConfig, metrics: StepMetrics, sampler: Sampler
    ) -> tuple[Execution, TokenSampler]:
        """What runs and samples steps, by the kind of graphs; sets `static`."""
        if self.kind == "off":
            return self._true_shapes(metrics), VllmSampler(sampler)
        self.static = self._make_static(kv_cache_config.num_blocks, metrics)
        self.static.divided_logits.reserve(self._vllm_config.num_speculative_tokens)
        return self.static.execution, self.static.sampler

    def _true_shapes(self, metrics: StepMetrics) -> TrueShapeExecution:
        graphs = self._native_graphs(self.decoder, metrics)
        return TrueShapeExecution(
            self.decoder, self._config.attention, self._block_size, self._tensors_on, self._sparse, graphs
        )

    def _native_graphs(self, decoder: Decoder | None, metrics: StepMetrics) -> NativeGraphs | None:
        """Of a model's small steps at true shapes, on a CPU.

        Not beside other connectors than ours, which may be called between the layers: a graph runs no Python there.
        """
        calls_layers = self.transfer is not None and self.transfer.in_layers
        on_cpu = self._tensors_on.type == "cpu" and self.kind == "off"
        if decoder is None or not on_cpu or calls_layers or not self._config.cpu.native_graphs:
            return None
        return NativeGraphs(decoder, metrics.native_graphs())

    def warm_up(self) -> float:
        """Warms what must be warm before serving; returns the seconds it took."""
        return 0.0 if self.static is None else self.static.warm_up()

    def close(self) -> None:
        """Ends a warm-up that is still going on, transfers of KV, and moves of memory mode."""
        if self.static is not None:
            self.static.close()
        if self._sparse is not None:
            self._sparse.close()
        if self.transfer is not None:
            self.transfer.close()

    def measure_steps(self) -> int:
        """Bytes that steps take beside the KV cache, after the largest have really run."""
        if self.kind != "off":
            need = graph_memory_need(
                self.decoder, self._vllm_config, self._config, self._device, self.kind, self._draft_decoder
            )
            self._memory_budget = need.budget
            return need.budget + need.buffers
        free = self._device.memory().free
        for decoder in filter(None, (self.decoder, self._draft_decoder)):
            self._run_largest_step(decoder, self._vllm_config.scheduler_config.max_num_batched_tokens)
        self._device.synchronize()
        return free - self._device.memory().free

    @torch.inference_mode()
    def _run_largest_step(self, decoder: Decoder, num_tokens: int) -> None:
        """Without attention, whose tiles bound what it takes."""
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._tensors_on)
        # any position does
        hidden = decoder.hidden(token_ids, token_ids, None)
        rows = min(num_tokens, self._vllm_config.scheduler_config.max_num_seqs)
        decoder.logits(hidden[:rows])

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Computes a step up to its logits. None: `sample_tokens` gives the output."""
        self._activity.begin()
        output = self.steps.execute_model(scheduler_output)
        if output is not None:
            self._activity.end()
        return output

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Samples the step that `execute_model` computed."""
        output = self.steps.sample_tokens(grammar_output)
        self._activity.end()
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts that the last step proposed for the next one, once."""
        return self.steps.take_draft_token_ids()

    def _make_static(self, num_blocks: int, metrics: StepMetrics) -> StaticShapes:
        # a graph has one form: without compaction block ids spread over the whole cache, so `auto` gathers
        contiguous = self._config.attention.contiguous_pa is True
        shared = self._config.graphs.max_shared_blocks
        choices = None if self._sparse is None else self._sparse.limits
        selected = 0 if choices is None else choices.max_selected_blocks
        limits = server_limits(self._vllm_config, self._block_size, num_blocks, contiguous, shared, selected)
        remainders = remainder_shapes(limits, choices)
        num_remainders = 0 if remainders is None else len(remainders.keys)
        buckets, usage = choose_buckets(self._config.graphs, self._vllm_config, limits, self._device, num_remainders)
        return StaticShapes(
            self.decoder,
            self._vllm_config,
            self._config,
            self._device,
            self._tensors_on,
            self.kind,
            buckets,
            usage,
            metrics,
            self._memory_budget,
            self._sparse,
            self._draft_decoder,
        )
