"""Our scheduler classes (`scheduler_config.scheduler_cls`): vLLM's with a sparse method's role, and our connector's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.config.ucm_config import idle_options, resolve_config
from vllm_gaudi_ucm.connector.connector import our_connector
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.protocol.attachments import attach_sparse_meta, computed_tokens, verified_drafts
from vllm_gaudi_ucm.scheduler.partial_load_steps import PartialLoadSteps
from vllm_gaudi_ucm.scheduler.setup import residency_role, scheduler_role
from vllm_gaudi_ucm.sparse.base import UcmSparseBase
from vllm_gaudi_ucm.sparse.options import read_extra_args
from vllm_gaudi_ucm.vllm_api.blocks import forget_uncomputed_blocks, set_blocks_apart
from vllm_gaudi_ucm.vllm_api.scheduling import AsyncScheduler, Scheduler
from vllm_gaudi_ucm.vllm_api.steps import RequestStatus

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.scheduling import EngineCoreOutputs
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, Request, SchedulerOutput

logger = plugin_logger(__name__)

_WITHOUT_BLOCKS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class _SparseScheduling(Scheduler):
    """Tells the method what happens to requests, and sends its selections with every step.

    Our connector hears who waits, so that their blocks come nearer before it is their turn.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = resolve_config(self.vllm_config.additional_config)
        ours = our_connector(self.connector)
        # others do not ask
        self._plan_prefetch: Callable[[Iterable[Request]], None] | None = None if ours is None else ours.plan_prefetch
        if self._plan_prefetch is None and (idle := idle_options(config)):
            where = "see --kv-transfer-config, and ucm.memory_mode.store"
            logger.warning("GSA's options %s do nothing without a store: %s.", ", ".join(idle), where)
        self.sparse: UcmSparseBase | None = scheduler_role(config, self.block_size, self.max_model_len)
        self.residency = residency_role(config, self.sparse, self.block_size, self.kv_cache_manager)
        self._partial_loads = PartialLoadSteps(self, self.residency)

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests  # else the next chunk of a streamed input
        if self.sparse is None or not is_new:
            super().add_request(request)
            return
        may_be_sparse = _may_be_sparse(request)
        if not may_be_sparse:
            # a block does not say what wrote it: what sparse steps have written must not be found
            set_blocks_apart(request, "ucm dense")
        super().add_request(request)
        # The id may be that of a request that has finished since the last step: its end is told first.
        self.sparse.request_finished_in_scheduler(request.request_id)
        if self.residency is not None:
            self.residency.end(request.request_id)
        if may_be_sparse:
            self.sparse.request_begin(request.request_id, request.prompt_token_ids or ())
            # the next chunk of a streamed input would attend to a context with gaps
            if self.residency is not None and not request.resumable:
                self.residency.begin(request.request_id)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        # they may run again at once: what this step allots them must not be taken for what they have lost
        reset = set(self.reset_preempted_req_ids)
        if self.residency is not None:
            self._end_residency()
            self.residency.preempted(reset)
            self.residency.before_scheduling(self.requests, len(self.running))
        if self._plan_prefetch is not None:
            self._plan_prefetch(request for request in self.waiting if request.status in _WITHOUT_BLOCKS)
        scheduler_output = super().schedule(*args, **kwargs)
        if self.sparse is None:
            return scheduler_output
        for request_id in scheduler_output.preempted_req_ids or ():
            self.sparse.request_preempted(request_id)
        for request_id in scheduler_output.finished_req_ids:
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                self.sparse.request_finished_in_scheduler(request_id)
        meta = self.sparse.build_sparse_meta(scheduler_output, self.requests)
        if self.residency is not None:
            self.residency.preempted(set(scheduler_output.preempted_req_ids or ()) - reset)
            meta.residency = self.residency.orders(meta.requests, self.requests, computed_tokens(scheduler_output))
        attach_sparse_meta(scheduler_output, meta)
        return scheduler_output

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        self._end_residency()
        return finished

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> Any:
        if self.residency is not None and reset_running_requests:
            # they are about to be preempted, and no block may be in use then
            self.residency.preempted([request.request_id for request in self.running])
        return super().reset_prefix_cache(reset_running_requests, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        forget_uncomputed_blocks(self.kv_cache_manager, request, self.block_size)
        super()._preempt_request(request, *args, **kwargs)

    def _end_residency(self) -> None:
        """A request that has ended waits for no block any more: those that wait for it are free for others."""
        if self.residency is None:
            return
        for request_id in self.finished_req_ids:
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                self.residency.end(request_id)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self.sparse is not None and scheduler_output.scheduled_spec_decode_tokens:
            for verified in verified_drafts(scheduler_output, model_runner_output, self.requests):
                self.sparse.drafts_verified(*verified)
        repeated = self._partial_loads.take_report(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.sparse is not None:
            for request_id in repeated:
                self.sparse.request_preempted(request_id)
        self._partial_loads.after_output(scheduler_output, model_runner_output, repeated)
        self._end_residency()
        return outputs


def _may_be_sparse(request: Request) -> bool:
    if request.sampling_params is None:
        return False
    try:
        return read_extra_args(request.sampling_params.extra_args)
    except ValueError as error:
        # Refused where requests are validated; one that came another way must not end the engine.
        logger.warning("request %s is dense: %s", request.request_id, error)
        return False


class UcmScheduler(_SparseScheduling):
    """Synchronous scheduling."""


class UcmAsyncScheduler(_SparseScheduling, AsyncScheduler):
    """Asynchronous scheduling."""
