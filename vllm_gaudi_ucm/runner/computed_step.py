"""A step whose logits are computed, but whose tokens are not sampled yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import NO_REMAINDERS, BatchInput, UnifiedPlan
from vllm_gaudi_ucm.sparse.selection.selection_state import DENSE_STEP, StepSelection

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.execution.execution import StepShape
    from vllm_gaudi_ucm.observability.step_clock import StepClock
    from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
    from vllm_gaudi_ucm.speculation.verification import StepLogits
    from vllm_gaudi_ucm.vllm_api.steps import KVConnectorOutput, LogprobsTensors, SchedulerOutput


@dataclass
class Division:
    """A step, or a part of it that runs together.

    is_part: whether the step has other divisions. selection: the blocks from which its requests choose. plan, shape:
    set once it is staged.
    """

    members: list[LiveRequest]
    batch: BatchInput
    clock: StepClock
    is_part: bool
    selection: StepSelection = DENSE_STEP
    plan: UnifiedPlan = field(init=False)
    shape: StepShape = field(init=False)

    def choose(self, selection: StepSelection) -> None:
        """Sets the selection, before the division is planned."""
        self.selection = selection

    def staged(self, plan: UnifiedPlan, shape: StepShape) -> None:
        """Records the plan that was copied to the device, and the shape in which it runs."""
        self.plan, self.shape = plan, shape

    def ordered(self, plan: UnifiedPlan) -> None:
        """Sets the same plan with its logits rows in the order of the sampler's slots."""
        self.plan = plan


@dataclass
class ComputedStep:
    """A step between forward and sampling; vLLM computes the grammar's bitmask in between.

    yields: bool [requests], which of them get tokens. remainders: int64 [n], requests whose rows choose together and
        are too many for an ordinary graph. verified: the logits of a step with drafts; any other step has `logits`.
        figures: fields of the step's record that parts add. nans: NaNs in logits by request. transferred: the KV
        connector's report for the scheduler.
    """

    scheduler_output: SchedulerOutput
    requests: list[LiveRequest]
    batch: BatchInput
    yields: NDArray[np.bool_]
    drafts: StepDrafts
    remainders: NDArray[np.int64] = field(default_factory=lambda: NO_REMAINDERS)
    verified: StepLogits | None = None
    logits: torch.Tensor | None = None
    divisions: list[Division] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    nans: dict[str, int] | None = None
    transferred: KVConnectorOutput | None = None
    prompt_logprobs: dict[str, LogprobsTensors | None] = field(default_factory=dict)

    def set_apart(self, remainders: NDArray[np.int64]) -> None:
        """Makes prompt remainders run separately. remainders: int64 [n], their requests."""
        self.remainders = remainders

    def verify(self, logits: StepLogits) -> None:
        """Sets the object that computes the logits of a step with drafts."""
        self.verified = logits

    def computed(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def sampled(self, nans: dict[str, int] | None) -> None:
        """Ends the clocks of the divisions, and sets the NaNs in the step's logits by request."""
        for division in self.divisions:
            division.clock.sampled(took_part=division is self.divisions[-1])
        self.nans = nans

    def moved_blocks(self, transferred: KVConnectorOutput) -> None:
        """Sets the report of the KV connector."""
        self.transferred = transferred
