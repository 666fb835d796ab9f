"""Pools the hidden states of a step: embeddings, scores and classes instead of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_gaudi_ucm.runner.parts import WorkerPart
from vllm_gaudi_ucm.vllm_api.pooling import (
    PoolerOutput,
    PoolingMetadata,
    PoolingParams,
    PoolingStates,
    late_interaction,
    pooler_of,
    pooling_tasks,
)

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.execution.execution import Execution
    from vllm_gaudi_ucm.observability.step_clock import StepClock
    from vllm_gaudi_ucm.runner.computed_step import ComputedStep, Division
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, NewRequestData, SchedulerOutput


class ModelPooler:
    """A model's pooler on its device.

    On a Gaudi this is the host: the shapes of a pooler's operations depend on the requests, and each would be compiled
    in a step. The hidden states of a bucket are copied as a whole there, which compiles nothing.

    Args:
        model: a pooling model. Its pooler moves to the device.
        device: the device of the pooler.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._pooler = pooler_of(model)
        self.device = device
        self._pooler.to(device)  # type: ignore[attr-defined]  # an nn.Module, see PoolerOfModel

    @property
    def tasks(self) -> tuple[Any, ...]:
        """Returns the names of the tasks that the model supports."""
        return pooling_tasks(self._model)

    def complete(self, params: PoolingParams) -> PoolingParams:
        """Returns a request's parameters with those that its task needs."""
        self._pooler.get_pooling_updates(params.task).apply(params)
        return params

    def pool(self, hidden: torch.Tensor, metadata: PoolingMetadata) -> PoolerOutput:
        """Returns an output for each request of the metadata; None for unfinished ones.

        hidden: [rows, hidden size], the rows of all requests, one after the other, on the pooler's device.
        """
        return self._pooler(hidden_states=hidden, pooling_metadata=metadata)

    def pool_dummies(self, hidden: torch.Tensor, most_requests: int) -> None:
        """Runs every task once over hidden states that belong to no request.

        hidden: [rows, hidden size]. The rows are shared out evenly among `most_requests`, or one to each.
        """
        rows = len(hidden)
        count = min(rows, most_requests)
        lengths = np.full(count, rows // count, np.int32)
        lengths[-1] += rows % count
        for task in self.tasks:
            params = self.complete(PoolingParams(task=task, use_activation=True))
            requests = [_Pooled(params, [0] * int(length)) for length in lengths]
            self.pool(hidden.to(self.device), pooling_metadata(requests, lengths, lengths, self.device))


@dataclass(frozen=True)
class _Pooled:
    """A live request: its parameters, its prompt, and the hidden states of earlier chunks of the prompt."""

    params: PoolingParams
    prompt: list[int]
    states: PoolingStates = field(default_factory=PoolingStates)


def pooling_metadata(
    requests: Sequence[_Pooled], scheduled: np.ndarray[Any, Any], ends: np.ndarray[Any, Any], device: torch.device
) -> PoolingMetadata:
    """Returns what a pooler reads of the requests of a step.

    scheduled: int32 [requests], rows of each. ends: int32 [requests], tokens of each that are computed after the step.
    device: device of the hidden states.
    """
    lengths = torch.tensor([len(one.prompt) for one in requests], dtype=torch.int32)
    prompts = None
    if any(one.params.requires_token_ids for one in requests):
        # poolers read as many tokens of a row as the prompt has
        prompts = torch.full((len(requests), int(lengths.max())), -1, dtype=torch.int64)
        for row, one in zip(prompts, requests, strict=True):
            row[: len(one.prompt)] = torch.tensor(one.prompt)
    metadata = PoolingMetadata(
        prompt_lens=lengths,
        prompt_token_ids=None,
        prompt_token_ids_cpu=prompts,
        pooling_params=[one.params for one in requests],
        pooling_states=[one.states for one in requests],
    )
    metadata.build_pooling_cursor(scheduled, torch.from_numpy(ends), device)
    return metadata


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
        self._late = late_interaction(vllm_config, pooler.device.type == "cuda")
        self._live: dict[str, _Pooled] = {}
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
        self._live[new.req_id] = _Pooled(params, list(new.prompt_token_ids or []))
        self._late.register_request(new.req_id, params)

    def before_plan(self, step: ComputedStep) -> None:
        self._outputs = {}

    def after_forward(self, division: Division) -> None:
        plan = division.plan
        members = [division.members[index] for index in plan.requests.tolist()]
        hidden = self._execution.hidden_states(plan.num_rows)
        self._pool(members, plan, hidden.to(self._pooler.device))

    def _pool(self, members: Sequence[LiveRequest], plan: UnifiedPlan, hidden: torch.Tensor) -> None:
        names = [request.request_id for request in members]
        requests = [self._live[name] for name in names]
        ends = plan.positions[plan.query_start[1:] - 1] + 1
        scheduled = np.diff(plan.query_start).astype(np.int32)
        metadata = pooling_metadata(requests, scheduled, ends.astype(np.int32), self._pooler.device)
        finished = metadata.get_pooling_cursor().get_finished_mask()
        found = self._late.postprocess_pooler_output(
            raw_pooler_output=self._pooler.pool(hidden, metadata),
            pooling_params=metadata.pooling_params,
            req_ids=names,
            finished_mask=finished,
        )
        if found is None or not any(finished):
            return
        if isinstance(found, torch.Tensor):
            found = list(found.cpu())
        for name, output, is_finished in zip(names, found, finished, strict=True):
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
