"""Pools the hidden states of a step: embeddings, scores and classes instead of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_ucm.runner.model_pooler import PooledRequest, pooling_metadata
from vllm_gaudi_ucm.runner.parts import WorkerPart
from vllm_gaudi_ucm.vllm_api.pooling import LateInteractionRunner

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.execution.execution import Execution
    from vllm_gaudi_ucm.observability.step_clock import StepClock
    from vllm_gaudi_ucm.runner.computed_step import ComputedStep, Division
    from vllm_gaudi_ucm.runner.model_pooler import ModelPooler
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, NewRequestData, SchedulerOutput


class PoolingSteps(WorkerPart):
    """Pools each division of a step once its forward is queued, and adds the outputs of finished prompts.

    Args:
        pooler: the model's pooler.
        execution: computes the hidden states.
        vllm_config: the engine's.
    """

    def __init__(self, pooler: ModelPooler, execution: Execution, vllm_config: VllmConfig) -> None:
        self._pooler = pooler
        self._execution = execution
        config = vllm_config.model_config.pooler_config
        # vLLM's kernel for it is of Triton
        has_kernel = pooler.device.type == "cuda" and config is not None and config.enable_flash_late_interaction
        self._late = LateInteractionRunner(enable_flash=has_kernel)
        self._live: dict[str, PooledRequest] = {}
        self._outputs: dict[str, torch.Tensor] = {}

    def requests_updated(self, scheduler_output: SchedulerOutput, clock: StepClock) -> None:
        finished = scheduler_output.finished_req_ids
        if finished:
            self._late.on_requests_finished(finished)
        for request_id in finished:
            self._live.pop(request_id, None)
        for request_id in scheduler_output.preempted_req_ids or ():
            # its prompt is computed again
            if (one := self._live.get(request_id)) is not None:
                one.states.clean()
        for new in scheduler_output.scheduled_new_reqs:
            self._add(new)

    def _add(self, new: NewRequestData) -> None:
        assert new.pooling_params is not None, "an engine that pools has only requests for it"
        params = self._pooler.complete(new.pooling_params)
        self._live[new.req_id] = PooledRequest(params, list(new.prompt_token_ids or []))
        self._late.register_request(new.req_id, params)

    def before_plan(self, step: ComputedStep) -> None:
        self._outputs = {}

    def after_forward(self, division: Division) -> None:
        plan = division.plan
        members = [division.members[index] for index in plan.requests.tolist()]
        hidden = self._execution.hidden_states(plan.num_rows).to(self._pooler.device)
        self._pool(members, plan, hidden[: plan.num_rows])

    def _pool(self, members: Sequence[LiveRequest], plan: UnifiedPlan, hidden: torch.Tensor) -> None:
        names = [request.request_id for request in members]
        requests = [self._live[name] for name in names]
        ends = plan.positions[plan.query_start[1:] - 1] + 1
        scheduled = np.diff(plan.query_start).astype(np.int32)
        metadata = pooling_metadata(requests, scheduled, ends.astype(np.int32), self._pooler.device)
        finished = metadata.get_pooling_cursor().get_finished_mask()
        raw = self._pooler.pool(hidden, metadata)
        if raw is None or not any(finished):
            return
        found = self._late.postprocess_pooler_output(
            raw_pooler_output=raw, pooling_params=metadata.pooling_params, req_ids=names, finished_mask=finished
        )
        outputs = list(found.cpu()) if isinstance(found, torch.Tensor) else found
        for name, output, is_finished in zip(names, outputs, finished, strict=True):
            if is_finished and output is not None:
                self._outputs[name] = _owned(output, hidden)

    def before_output(self, step: ComputedStep, output: ModelRunnerOutput) -> None:
        output.pooler_output = [self._outputs.get(request_id) for request_id in output.req_ids]


def _owned(output: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Returns an output on the host that later steps do not overwrite: token-wise pooling may return rows as they
    are.
    """
    same = output.untyped_storage().data_ptr() == hidden.untyped_storage().data_ptr()
    return output.clone() if same and output.device.type == "cpu" else output.cpu()
