"""One step: scheduler output in, sampled tokens out. Each stage of it is a file of its own beside this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from vllm import envs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from vllm_gaudi_ucm.compat import raise_if_nan_logits
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.memory.kv_cache import allocate_kv_cache
from vllm_gaudi_ucm.metrics.step_metrics import StepMetrics
from vllm_gaudi_ucm.phase_log import PhaseLog
from vllm_gaudi_ucm.runner.batch_plan import UnifiedPlan, plan_batch
from vllm_gaudi_ucm.runner.decoder import Decoder, DecoderModel
from vllm_gaudi_ucm.runner.execution import Execution, StepShape
from vllm_gaudi_ucm.runner.packed_weights import pack_linear_layers
from vllm_gaudi_ucm.runner.prompt_logprobs import PromptLogprobs
from vllm_gaudi_ucm.runner.request_table import LiveRequest, RequestTable
from vllm_gaudi_ucm.runner.sampling import SamplingBatch
from vllm_gaudi_ucm.runner.step_record import StepClock
from vllm_gaudi_ucm.runner.true_shape_execution import TrueShapeExecution

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.worker.gpu_input_batch import InputBatch

    from vllm_gaudi_ucm.config import UcmConfig

logger = plugin_logger(__name__)


@dataclass
class _ComputedStep:
    """Between forward and sampling: vLLM computes the grammar's bitmask in between."""

    scheduler_output: SchedulerOutput
    requests: list[LiveRequest]
    plan: UnifiedPlan
    shape: StepShape
    logits: torch.Tensor
    prompt_logprobs: dict[str, LogprobsTensors | None]
    clock: StepClock


class ModelRunner:
    """Runs a decoder model on one device, prompts and decodes in one flat batch.

    Args:
        vllm_config: the engine's.
        config: the plugin's own options.
        device: where model and KV cache live.
    """

    def __init__(self, vllm_config: VllmConfig, config: UcmConfig, device: torch.device) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._device = device
        self._sampler = Sampler(vllm_config.model_config.logprobs_mode)
        self._sampling = SamplingBatch(vllm_config, device)
        self._computed: _ComputedStep | None = None
        self.decoder: Decoder
        self.requests: RequestTable
        self.kv_caches: dict[str, torch.Tensor] = {}

    def load_model(self) -> None:
        model = get_model(vllm_config=self._vllm_config)
        if self._device.type == "cpu" and self._config.cpu.packed_weights:
            logger.info("Packed %d linear layers", pack_linear_layers(model))
        self.decoder = Decoder(cast(DecoderModel, model), self._vllm_config)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        specs = {name: layer.get_kv_cache_spec(self._vllm_config) for name, layer in self._attention_layers().items()}
        return {name: spec for name, spec in specs.items() if spec is not None}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, phase_log: PhaseLog, metrics: StepMetrics) -> None:
        """Allocates the cache, hands each layer its view, and sizes the request table by the final block size.

        phase_log and metrics take every step from now on.
        """
        self._phase_log = phase_log
        self._metrics = metrics
        (group,) = kv_cache_config.kv_cache_groups
        self._block_size = group.kv_cache_spec.block_size
        self.kv_caches = allocate_kv_cache(kv_cache_config, self._device)
        layers = self._attention_layers()
        for name, cache in self.kv_caches.items():
            layers[name].bind_kv_cache(cache)
        max_num_seqs = self._vllm_config.scheduler_config.max_num_seqs
        self.requests = RequestTable(max_num_seqs, self._vllm_config.model_config.max_model_len, self._block_size)
        self._execution: Execution = TrueShapeExecution(
            self.decoder, self._config.attention, self._block_size, self._device
        )
        model_config = self._vllm_config.model_config
        as_logits = model_config.logprobs_mode.endswith("logits")
        self._prompt_logprobs = PromptLogprobs(self._execution, self._sampler, model_config.get_vocab_size(), as_logits)

    @torch.inference_mode()
    def measure_activations(self, num_tokens: int) -> None:
        """Runs the largest step without attention, so that the device's peak memory can be read afterwards."""
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        positions = torch.arange(num_tokens, device=self._device) % self._vllm_config.model_config.max_model_len
        hidden = self.decoder.hidden(token_ids, positions, None)
        rows = min(num_tokens, self._vllm_config.scheduler_config.max_num_seqs)
        self.decoder.logits(hidden[:rows])

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Computes a step up to its logits. None: `sample_tokens` gives the output."""
        clock = StepClock()
        self.requests.update(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        requests, batch = self.requests.scheduled(scheduler_output.num_scheduled_tokens)
        plan = plan_batch(batch, self._block_size, self._config.attention.causal_slice)
        plan = self._order_logits(plan, requests)
        token_ids = self.requests.tokens_at(requests, plan.requests[plan.row_requests], plan.positions)
        shape = self._execution.stage(plan, token_ids)
        clock.planned()
        self._execution.forward()
        prompt_logprobs = self._score_prompts(requests, plan)
        logits = self._execution.logits(plan.logits_rows)
        clock.computed()
        self._computed = _ComputedStep(scheduler_output, requests, plan, shape, logits, prompt_logprobs, clock)
        return None

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Samples the step that `execute_model` computed, and writes the tokens back to the request table."""
        step, self._computed = self._computed, None
        assert step is not None, "sample_tokens without a computed step"
        nans = self._count_nans(step.logits)
        if grammar_output is not None:
            # all that vLLM's helper reads of its third argument is `req_ids`
            batch = cast("InputBatch", self._sampling)
            apply_grammar_bitmask(step.scheduler_output, grammar_output, batch, step.logits)
        tokens: list[list[int]] = []
        logprobs: LogprobsLists | None = None
        if self._sampling.slots:
            sampled = self._sampler(step.logits, self._sampling.metadata)
            tokens = sampled.sampled_token_ids.tolist()
            logprobs = None if sampled.logprobs_tensors is None else sampled.logprobs_tensors.tolists()
        for request, (token,) in zip(self._sampling.slots, tokens, strict=True):
            self.requests.append_token(request, token)
        step.clock.sampled()
        record = step.clock.record(self._phase_log.summary.steps, step.plan, step.shape)
        self._phase_log.append(record)
        self._metrics.step(record.bucket, record.padded)
        self._metrics.times(record.plan_ms, record.forward_ms, record.sample_ms)
        return self._output(step, tokens, logprobs, nans)

    def _output(
        self,
        step: _ComputedStep,
        tokens: list[list[int]],
        logprobs: LogprobsLists | None,
        nans: dict[str, int] | None,
    ) -> ModelRunnerOutput:
        """Requests in the sampler's order first, so that a request's index is its row of tokens and logprobs."""
        sampled_ids = self._sampling.req_ids
        without = set(step.scheduler_output.num_scheduled_tokens).difference(sampled_ids)
        req_ids = sampled_ids + [request.request_id for request in step.requests if request.request_id in without]
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(req_ids)},
            sampled_token_ids=tokens + [[] for _ in without],
            logprobs=logprobs,
            prompt_logprobs_dict=step.prompt_logprobs,
            num_nans_in_logits=nans,
        )

    def _order_logits(self, plan: UnifiedPlan, requests: list[LiveRequest]) -> UnifiedPlan:
        """Brings the logits rows into the order of the sampler's slots."""
        wanted = [requests[index] for index in plan.logits_requests.tolist()]
        self._sampling.sync(wanted)
        place = {request: index for index, request in enumerate(wanted)}
        order = np.fromiter((place[request] for request in self._sampling.slots), np.int64, len(wanted))
        return plan._replace(logits_requests=plan.logits_requests[order], logits_rows=plan.logits_rows[order])

    def _score_prompts(self, requests: list[LiveRequest], plan: UnifiedPlan) -> dict[str, LogprobsTensors | None]:
        scores: dict[str, LogprobsTensors | None] = {}
        for flat, index in enumerate(plan.requests.tolist()):
            request = requests[index]
            if self._prompt_logprobs.wanted(request):
                start, stop = plan.query_start[flat : flat + 2].tolist()
                found = self._prompt_logprobs.score(request, range(start, stop), int(plan.positions[start]))
                if found is not None:
                    scores[request.request_id] = found
        return scores

    def _count_nans(self, logits: torch.Tensor) -> dict[str, int] | None:
        """vLLM's NaN counter and its fail-fast flag (VLLM_COMPUTE_NANS_IN_LOGITS, VLLM_RAISE_ON_LOGIT_NANS)."""
        if not envs.VLLM_COMPUTE_NANS_IN_LOGITS:
            return None
        counts = dict(zip(self._sampling.req_ids, logits.isnan().sum(dim=-1).tolist(), strict=True))
        if envs.VLLM_RAISE_ON_LOGIT_NANS:
            raise_if_nan_logits(counts)
        return counts

    def _attention_layers(self) -> dict[str, AttentionLayerBase]:
        context = self._vllm_config.compilation_config.static_forward_context
        return {name: layer for name, layer in context.items() if isinstance(layer, AttentionLayerBase)}
