"""The part of a worker that gives the prompts of new requests their positions on each axis (M-RoPE)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.batch.mrope_positions import MropePositions
from vllm_gaudi_ucm.runner.parts import WorkerPart
from vllm_gaudi_ucm.vllm_api.rotary import prompt_positions

if TYPE_CHECKING:
    from torch import nn

    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.observability.step_clock import StepClock
    from vllm_gaudi_ucm.vllm_api.steps import SchedulerOutput


class MropeSteps(WorkerPart):
    """Has the model compute the positions of each new prompt, also of the next input of a session. A request keeps them
    while it is preempted.

    Args:
        requests: the live requests.
        model: computes positions.
    """

    def __init__(self, requests: RequestTable, model: nn.Module) -> None:
        self._requests = requests
        self._positions = requests.input_of(MropePositions)
        self._model = model

    def requests_updated(self, scheduler_output: SchedulerOutput, clock: StepClock) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            row = self._requests.requests[new.req_id].row
            self._positions.place(row, *prompt_positions(self._model, new))
