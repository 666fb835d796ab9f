"""One step: scheduler output in, sampled tokens out. Each stage of it is a file of its own beside this one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.model_executor.model_loader import get_model
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, LogprobsTensors, ModelRunnerOutput
from vllm.v1.sample.sampler import Sampler

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.memory.kv_cache import allocate_kv_cache
from vllm_gaudi_ucm.metrics.step_metrics import StepMetrics
from vllm_gaudi_ucm.phase_log import PhaseLog
from vllm_gaudi_ucm.runner.attention_choice import make_choice
from vllm_gaudi_ucm.runner.attention_layers import bind_kv_caches, kv_cache_specs
from vllm_gaudi_ucm.runner.batch_plan import BatchInput, UnifiedPlan
from vllm_gaudi_ucm.runner.bucket_choice import choose_buckets, server_limits
from vllm_gaudi_ucm.runner.decoder import Decoder, DecoderModel
from vllm_gaudi_ucm.runner.execution import Execution, StepShape
from vllm_gaudi_ucm.runner.graph_kind import GraphKind
from vllm_gaudi_ucm.runner.graph_measurement import GIB, graph_memory_need
from vllm_gaudi_ucm.runner.kv_transfer import KvTransfer
from vllm_gaudi_ucm.runner.nan_logits import NanCounter
from vllm_gaudi_ucm.runner.packed_weights import pack_linear_layers
from vllm_gaudi_ucm.runner.prompt_logprobs import PromptLogprobs
from vllm_gaudi_ucm.runner.request_table import LiveRequest, RequestTable
from vllm_gaudi_ucm.runner.sampling import SamplingBatch
from vllm_gaudi_ucm.runner.sparse_setup import make_sparse_worker
from vllm_gaudi_ucm.runner.static_shapes import StaticShapes
from vllm_gaudi_ucm.runner.steady_plan import SteadyPlanner
from vllm_gaudi_ucm.runner.step_record import StepClock
from vllm_gaudi_ucm.runner.token_sampler import Grammar, SampledTokens, TokenSampler, VllmSampler
from vllm_gaudi_ucm.runner.true_shape_execution import TrueShapeExecution
from vllm_gaudi_ucm.sparse.device.selection_state import DENSE_STEP
from vllm_gaudi_ucm.speculation.draft_layers import load_draft_model
from vllm_gaudi_ucm.speculation.factory import make_proposer
from vllm_gaudi_ucm.speculation.proposer import SampledStep, wanted_drafts
from vllm_gaudi_ucm.speculation.step_drafts import StepDrafts
from vllm_gaudi_ucm.speculation.step_logits import StepLogits
from vllm_gaudi_ucm.speculation.verification import Verification

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec

    from vllm_gaudi_ucm.config import UcmConfig
    from vllm_gaudi_ucm.device import Device

logger = plugin_logger(__name__)


@dataclass
class _Computed:
    """A step, or one division of it, that has run."""

    plan: UnifiedPlan
    shape: StepShape
    clock: StepClock


@dataclass
class _ComputedStep:
    """Between forward and sampling: vLLM computes the grammar's bitmask in between."""

    scheduler_output: SchedulerOutput
    requests: list[LiveRequest]
    batch: BatchInput
    yields: NDArray[np.bool_]
    drafts: StepDrafts
    logits: StepLogits
    divisions: list[_Computed] = field(default_factory=list)
    prompt_logprobs: dict[str, LogprobsTensors | None] = field(default_factory=dict)


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
        self._computed: _ComputedStep | None = None
        self._drafts: DraftTokenIds | None = None
        self._draft_decoder: Decoder | None = None
        self.static: StaticShapes | None = None
        self.transfer: KvTransfer | None = None
        given = config.graphs.memory_budget
        self._memory_budget = None if given is None else int(given * GIB)
        self.decoder: Decoder
        self.requests: RequestTable
        self.kv_caches: dict[str, torch.Tensor] = {}

    def load_model(self) -> None:
        models = [get_model(vllm_config=self._vllm_config)]
        draft_model = load_draft_model(self._vllm_config)
        if draft_model is not None:
            models.append(draft_model)
        if self._device.kind == "cpu" and self._config.cpu.packed_weights and self.kind != "compile":
            for model in models:
                layers = pack_linear_layers(model, self._config.cpu.compact_weights)
                logger.info("Packed %d linear layers, %d of them also in fewer bits", *layers)
        self.decoder, *draft = (Decoder(cast(DecoderModel, model), self._vllm_config) for model in models)
        self._draft_decoder = draft[0] if draft else None
        if self.kind == "compile":
            for decoder in (self.decoder, *draft):
                decoder.compile("hpu_backend" if self._device.kind == "hpu" else "inductor")

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return kv_cache_specs(self._vllm_config)

    @torch.inference_mode()
    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, phase_log: PhaseLog, metrics: StepMetrics) -> None:
        """Allocates the cache, hands each layer its view, and prepares what depends on the final number of blocks.

        phase_log and metrics take every step from now on.
        """
        self._phase_log = phase_log
        self._metrics = metrics
        (group,) = kv_cache_config.kv_cache_groups
        self._block_size = group.kv_cache_spec.block_size
        if self._vllm_config.kv_transfer_config is not None:
            self.transfer = KvTransfer(self._vllm_config, kv_cache_config, in_layers=self.kind == "off")
        with nullcontext() if self.transfer is None else self.transfer.allocation():
            self.kv_caches = allocate_kv_cache(kv_cache_config, self._tensors_on, self.kind == "compile")
        bind_kv_caches(self._vllm_config, self.kv_caches)
        if self.transfer is not None:
            self.transfer.register(self.kv_caches)
            self.transfer.report_to(metrics)
        max_num_seqs = self._vllm_config.scheduler_config.max_num_seqs
        model_config = self._vllm_config.model_config
        self.requests = RequestTable(max_num_seqs, model_config.max_model_len, self._block_size)
        self._planner = SteadyPlanner(self._block_size, self._config.attention.causal_slice)
        self._sparse = make_sparse_worker(
            self._config,
            self._vllm_config,
            self.kv_caches,
            self._block_size,
            kv_cache_config.num_blocks,
            static=self.kind != "off",
            table=self.requests,
        )
        self._sparse_metrics = None if self._sparse is None else self._sparse.report_to(metrics)
        sampler = Sampler(model_config.logprobs_mode, model_config.use_fp64_gumbel)
        self._execution: Execution
        self._sampler: TokenSampler
        if self.kind == "off":
            attention, spec = self._config.attention, cast("AttentionSpec", group.kv_cache_spec)
            choice = make_choice(
                attention.cost_model,
                attention.implementation,
                self._tensors_on,
                self._vllm_config,
                spec,
                len(group.layer_names),
            )
            self._execution = TrueShapeExecution(
                self.decoder, attention, self._block_size, self._tensors_on, self._sparse, choice
            )
            self._sampler = VllmSampler(sampler)
        else:
            self.static = self._make_static(kv_cache_config.num_blocks)
            self.static.divided_logits.reserve(self._vllm_config.num_speculative_tokens)
            self._execution, self._sampler = self.static.execution, self.static.sampler
        self._nans = NanCounter(self._sampling, on_host=self.static is not None)
        self._verification = Verification(self._sampling, self._sampler, self.requests, self._nans.count)
        self._proposer = make_proposer(
            self._vllm_config,
            self._config.attention,
            self._draft_decoder,
            self.requests,
            self._block_size,
            self._tensors_on,
            self.static,
        )
        self._prompt_logprobs = PromptLogprobs(
            self._execution,
            sampler,
            model_config.get_vocab_size(),
            as_logits=model_config.logprobs_mode.endswith("logits"),
            on_host=self.static is not None,
        )

    def warm_up(self) -> float:
        """Warms what must be warm before serving; returns the seconds it took."""
        return 0.0 if self.static is None else self.static.warm_up()

    def close(self) -> None:
        """Ends a warm-up that is still going on, transfers of KV, and moves of memory mode."""
        if self.static is not None:
            self.static.close()
        # a worker may end before it has a cache
        sparse = getattr(self, "_sparse", None)
        if sparse is not None:
            sparse.close()
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

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Computes a step up to its logits. None: `sample_tokens` gives the output."""
        if self.static is not None:
            # may wait for a graph that is being warmed, which is no part of the step's times
            self.static.begin_step()
        clock = StepClock()
        self.requests.update(scheduler_output)
        if self._sparse is not None:
            self._sparse.update(scheduler_output)
        if self.transfer is not None:
            if self._sparse is not None:
                self._sparse.loaded(self.transfer.loaded_blocks(scheduler_output))
            self.transfer.begin(scheduler_output)
            clock.skip(self.transfer.work.last_seconds)
        if not scheduler_output.total_num_scheduled_tokens:
            transferred = None if self.transfer is None else self.transfer.finish()
            if self.static is not None:
                self.static.end_step()
            return ModelRunnerOutput.with_kv_conn_output_only(transferred)
        drafts = StepDrafts.of(scheduler_output)
        self.requests.write_drafts(drafts.tokens)
        requests, batch = self.requests.scheduled(drafts.num_scheduled)
        yields = batch.num_computed + batch.num_scheduled >= batch.num_tokens
        self._sampling.sync([requests[index] for index in yields.nonzero()[0].tolist()])
        # static shapes have no graph that gathers rows
        logits = StepLogits(self._execution, drafts, at_once=self.static is None)
        step = _ComputedStep(scheduler_output, requests, batch, yields, drafts, logits)
        divisions = self._execution.divide(batch)
        if self.static is not None and len(divisions) > 1:
            self.static.bypassed("step divided: more shared blocks than ucm.graphs.max_shared_blocks")
        if len(divisions) == 1:
            self._compute(step, requests, batch, clock, divided=False)
        else:
            for index in divisions:
                self._compute(step, [requests[i] for i in index.tolist()], batch.take(index), clock, divided=True)
                clock = StepClock()
        self._computed = step
        return None

    def _compute(
        self, step: _ComputedStep, members: list[LiveRequest], batch: BatchInput, clock: StepClock, divided: bool
    ) -> None:
        """Runs a step, or one division of it, and keeps its logits in the order of the sampler's slots."""
        selection = DENSE_STEP
        if self._sparse is not None:
            selection = self._sparse.step(step.scheduler_output, step.drafts, members, batch)
        plan, slots = self._order_logits(self._planner.plan(batch, selection.input), members)
        token_ids = self.requests.tokens_at(members, plan.requests[plan.row_requests], plan.positions)
        shape = self._execution.stage(plan, token_ids, selection.summary_blocks)
        clock.planned()
        self._forward(plan)
        step.prompt_logprobs.update(self._score_prompts(members, plan))
        yielding = [members[index] for index in plan.logits_requests.tolist()]
        if divided:
            assert self.static is not None, "only static shapes divide steps"
            put_at = self.static.divided_logits
            step.logits.compute_division(yielding, plan.logits_rows, slots, put_at, len(self._sampling.slots))
        else:
            step.logits.compute(yielding, plan.logits_rows)
        clock.computed()
        step.divisions.append(_Computed(plan, shape, clock))

    def _forward(self, plan: UnifiedPlan) -> None:
        if self._sparse is None:
            self._execution.forward()
            return
        self._sparse.method.execute_begin(plan)
        self._execution.forward()
        self._sparse.method.execute_finished()

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Samples the step that `execute_model` computed, and writes the tokens back to the request table."""
        step, self._computed = self._computed, None
        assert step is not None, "sample_tokens without a computed step"
        grammar = None if grammar_output is None else Grammar(step.scheduler_output, grammar_output)
        sampled_ids = self._sampling.req_ids
        sampled = self._verification.sample(step.logits, step.drafts, grammar)
        self._propose(step)
        for computed in step.divisions:
            computed.clock.sampled(took_part=computed is step.divisions[-1])
        transferred = self._finish_transfer()
        self._record(step)
        output = self._output(step, sampled_ids, sampled)
        output.kv_connector_output = transferred
        if self._sparse is not None:
            self._sparse.attach_report(output)
        if self.static is not None:
            self.static.end_step()
        return output

    def _finish_transfer(self) -> KVConnectorOutput | None:
        """After the drafts: they read and write blocks, too."""
        if self.transfer is None:
            return None
        self.transfer.computed()
        return self.transfer.finish()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts that the last step proposed for the next one, once."""
        drafts, self._drafts = self._drafts, None
        return drafts

    def _propose(self, step: _ComputedStep) -> None:
        if self._proposer is None:
            return
        num_drafts = step.scheduler_output.num_spec_tokens_to_schedule
        wanted = wanted_drafts(step.requests, step.yields, self.requests, num_drafts)
        drafts = self._proposer.propose(SampledStep(step.requests, step.batch, step.yields, wanted))
        self._drafts = DraftTokenIds([request.request_id for request in step.requests], drafts)

    def _record(self, step: _ComputedStep) -> None:
        """Every division ran in a shape of its own; sampling, and what was transferred, belong to the last."""
        for computed in step.divisions:
            record = computed.clock.record(
                self._phase_log.summary.steps, computed.plan, computed.shape, self._block_size
            )
            if self.transfer is not None and computed is step.divisions[-1]:
                record = self.transfer.take_work().noted_in(record)
            self._phase_log.append(record)
            self._metrics.step(record.bucket, record.padded)
            self._metrics.times(record.plan_ms, record.forward_ms, record.sample_ms)
        if self._sparse is not None and self._sparse_metrics is not None:
            self._sparse.report(self._sparse_metrics)

    def _output(self, step: _ComputedStep, sampled_ids: list[str], sampled: SampledTokens) -> ModelRunnerOutput:
        """Requests in the sampler's order first, so that a request's index is its entry of tokens and logprobs."""
        without = set(step.scheduler_output.num_scheduled_tokens).difference(sampled_ids)
        req_ids = sampled_ids + [request.request_id for request in step.requests if request.request_id in without]
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(req_ids)},
            sampled_token_ids=sampled.tokens + [[] for _ in without],
            logprobs=sampled.logprobs,
            prompt_logprobs_dict=step.prompt_logprobs,
            num_nans_in_logits=self._nans.take(),
        )

    def _order_logits(self, plan: UnifiedPlan, members: list[LiveRequest]) -> tuple[UnifiedPlan, NDArray[np.int64]]:
        """Brings the logits rows into the order of the sampler's slots; returns the slots, too."""
        slot_of = {request: slot for slot, request in enumerate(self._sampling.slots)}
        yielding = (slot_of[members[index]] for index in plan.logits_requests.tolist())
        slots = np.fromiter(yielding, np.int64, len(plan.logits_requests))
        order = np.argsort(slots)
        requests, rows = plan.logits_requests[order], plan.logits_rows[order]
        return plan._replace(logits_requests=requests, logits_rows=rows), slots[order]

    def _score_prompts(self, requests: list[LiveRequest], plan: UnifiedPlan) -> dict[str, LogprobsTensors | None]:
        scores: dict[str, LogprobsTensors | None] = {}
        for flat, index in enumerate(plan.requests.tolist()):
            request = requests[index]
            if self._prompt_logprobs.wanted(request):
                if self.static is not None:
                    self.static.bypassed("prompt logprobs on host")
                start, stop = plan.query_start[flat : flat + 2].tolist()
                found = self._prompt_logprobs.score(request, range(start, stop), int(plan.positions[start]))
                if found is not None:
                    scores[request.request_id] = found
        return scores

    def _make_static(self, num_blocks: int) -> StaticShapes:
        # a graph has one form: without compaction block ids spread over the whole cache, so `auto` gathers
        contiguous = self._config.attention.contiguous_pa is True
        shared = self._config.graphs.max_shared_blocks
        choices = None if self._sparse is None else self._sparse.limits
        selected = 0 if choices is None else choices.max_selected_blocks
        limits = server_limits(self._vllm_config, self._block_size, num_blocks, contiguous, shared, selected)
        buckets, usage = choose_buckets(self._config.graphs, self._vllm_config, limits, self._device)
        return StaticShapes(
            self.decoder,
            self._vllm_config,
            self._config,
            self._device,
            self._tensors_on,
            self.kind,
            buckets,
            usage,
            self._metrics,
            self._memory_budget,
            self._sparse,
            self._draft_decoder,
        )
