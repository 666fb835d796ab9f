"""A step whose logits are computed, and whose tokens are not sampled yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.observability.host_work import NO_HOST_WORK, HostCounts

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan
    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.execution.execution import StepShape
    from vllm_gaudi_ucm.observability.step_clock import StepClock
    from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
    from vllm_gaudi_ucm.runner.kv_transfer import TransferWork
    from vllm_gaudi_ucm.speculation.verification import StepLogits
    from vllm_gaudi_ucm.vllm_api.steps import KVConnectorOutput, LogprobsTensors, SchedulerOutput


@dataclass
class Computed:
    """A step, or one division of it, that has run."""

    plan: UnifiedPlan
    shape: StepShape
    clock: StepClock


@dataclass
class ComputedStep:
    """Between forward and sampling: vLLM computes the grammar's bitmask in between.

    host, nans, moved: what was waited for, NaNs in logits by request, and blocks that moved, up to the end of its
    sampling. transferred: what a KV connector tells the scheduler. transfer: blocks that it has moved.
    """

    scheduler_output: SchedulerOutput
    requests: list[LiveRequest]
    batch: BatchInput
    yields: NDArray[np.bool_]
    drafts: StepDrafts
    verified: StepLogits | None
    """Of a step with drafts; any other has `logits`."""
    logits: torch.Tensor | None = None
    divisions: list[Computed] = field(default_factory=list)
    host: HostCounts = NO_HOST_WORK
    nans: dict[str, int] | None = None
    moved: Mapping[str, int] = field(default_factory=dict)
    transferred: KVConnectorOutput | None = None
    transfer: TransferWork | None = None
    prompt_logprobs: dict[str, LogprobsTensors | None] = field(default_factory=dict)
