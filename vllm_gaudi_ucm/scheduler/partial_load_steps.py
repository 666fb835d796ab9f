"""In our scheduler: a first step that has missed too much is repeated, and a request whose load failed begins anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.protocol.attachments import computed_tokens, report_of
from vllm_gaudi_ucm.protocol.offload import ResidencyReport
from vllm_gaudi_ucm.vllm_api.blocks import step_never_was, wait_for_blocks_again
from vllm_gaudi_ucm.vllm_api.steps import RequestStatus

if TYPE_CHECKING:
    from vllm_gaudi_ucm.kv_offload.scheduler_side import Fetched, ResidencyScheduler
    from vllm_gaudi_ucm.vllm_api.scheduling import Scheduler
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, SchedulerOutput


class PartialLoadSteps:
    """Of prompts of which our connector has left blocks in its store.

    Args:
        scheduler: vLLM's, whose queues change.
        residency: memory mode, None where it is off: then nothing here does anything.
    """

    def __init__(self, scheduler: Scheduler, residency: ResidencyScheduler | None) -> None:
        self._scheduler = scheduler
        self._residency = residency
        connector: Any = scheduler.connector
        bind: Callable[[ResidencyScheduler], None] | None = getattr(connector, "bind_memory_mode", None)
        if residency is not None and bind is not None:
            bind(residency)
            self._fetch: Callable[[str, Fetched], None] = connector.fetch

    def take_report(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> Mapping[str, Fetched]:
        """Before the scheduler takes the output of a step. Returns the requests whose step is to be repeated; their
        tokens are no part of the output any more."""
        if self._residency is None:
            return {}
        report = report_of(output) or ResidencyReport()
        repeated = self._residency.take(report, scheduler_output.num_scheduled_tokens)
        for request_id in repeated:
            step_never_was(self._scheduler.requests[request_id], output)
        return repeated

    def after_output(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput, repeated: Mapping[str, Fetched]
    ) -> None:
        """Once the scheduler has taken the output: they wait for what their queries want; and requests whose load has
        failed lose all of their blocks, as they have gaps."""
        if self._residency is None:
            return
        before = dict(computed_tokens(scheduler_output)) if repeated else {}
        for request_id, fetched in repeated.items():
            wait_for_blocks_again(self._scheduler, self._scheduler.requests[request_id], before[request_id])
            self._fetch(request_id, fetched)
        transfer = output.kv_connector_output
        for request_id in () if transfer is None else transfer.failed_recving:
            request = self._scheduler.requests.get(request_id)
            if request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._residency.give_up(request)
