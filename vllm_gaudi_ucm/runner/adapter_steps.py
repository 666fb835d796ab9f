"""The part of a worker that gives the adapters of each step their slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.batch.adapter_slots import NO_ADAPTER, AdapterSlots
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.protocol.attachments import attach_failures
from vllm_gaudi_ucm.runner.parts import WorkerPart

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.lora.adapter_manager import AdapterManager
    from vllm_gaudi_ucm.observability.step_clock import StepClock
    from vllm_gaudi_ucm.runner.computed_step import ComputedStep
    from vllm_gaudi_ucm.vllm_api.lora import LoRARequest
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, SchedulerOutput

logger = plugin_logger(__name__)


class AdapterSteps(WorkerPart):
    """Loads the adapters of a step, and writes the slot of each request's adapter to the row input.

    A request whose adapter cannot be loaded runs this step without one; its output says so, and our scheduler ends it
    with an error, without its tokens and its blocks.

    Args:
        requests: the live requests.
        manager: loads adapters.
    """

    def __init__(self, requests: RequestTable, manager: AdapterManager) -> None:
        self._requests = requests
        self._slots = requests.input_of(AdapterSlots)
        self._manager = manager
        self._failures: dict[str, str] = {}

    def requests_updated(self, scheduler_output: SchedulerOutput, clock: StepClock) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            if new.lora_request is not None and new.lora_request.load_inplace:
                # once for a request, not in each of its steps
                self._reload(new.req_id, new.lora_request)
        rows = {name: self._requests.requests[name].row for name in scheduler_output.num_scheduled_tokens}
        asked = {name: one for name, row in rows.items() if (one := self._slots.adapter(row)) is not None}
        if not asked:
            return
        found = self._manager.slots_of({one.lora_int_id: one for one in asked.values()})
        for name, one in asked.items():
            slot = found[one.lora_int_id]
            if isinstance(slot, Exception):
                self._fail(name, slot)
            self._slots.place(rows[name], NO_ADAPTER if name in self._failures or isinstance(slot, Exception) else slot)

    def before_output(self, step: ComputedStep, output: ModelRunnerOutput) -> None:
        mine = {one.request_id for one in step.requests}.intersection(self._failures)
        attach_failures(output, {name: self._failures.pop(name) for name in mine})

    def _reload(self, name: str, adapter: LoRARequest) -> None:
        try:
            self._manager.load(adapter)
        except Exception as error:
            self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        if name not in self._failures:
            logger.warning("Request %s ends: %s", name, error)
        self._failures[name] = str(error)
