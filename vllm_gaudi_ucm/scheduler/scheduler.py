"""Our scheduler class (`scheduler_config.scheduler_cls`): vLLM's scheduler with the parts that are switched on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.block_policies.policies import make_policies
from vllm_gaudi_ucm.scheduler.block_manager import BlockManager
from vllm_gaudi_ucm.scheduler.setup import make_parts
from vllm_gaudi_ucm.vllm_api.blocks import drop_steps_in_flight, forget_uncomputed_blocks
from vllm_gaudi_ucm.vllm_api.scheduling import AsyncScheduler, EngineCoreOutputs, Scheduler

if TYPE_CHECKING:
    from vllm_gaudi_ucm.memory_mode.scheduler_side import OffloadScheduler
    from vllm_gaudi_ucm.sparse.base import UcmSparseBase
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, Request, SchedulerOutput


class UcmScheduler(Scheduler):
    """Synchronous scheduling. Calls its parts (`SchedulerPart`) before and after the steps of vLLM's scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block_policies = make_policies(self)
        if self.block_policies.members:
            self.kv_cache_manager = BlockManager.from_manager(self.kv_cache_manager, self.block_policies.members)
            if self.connector is not None:
                self.connector.bind_kv_cache_manager(self.kv_cache_manager)
        self.parts = make_parts(self, self.block_policies)

    @property
    def sparse(self) -> UcmSparseBase | None:
        return next((part.method for part in self.parts if part.method is not None), None)

    @property
    def offload(self) -> OffloadScheduler | None:
        return next((part.offload for part in self.parts if part.offload is not None), None)

    def add_request(self, request: Request) -> None:
        # a known request is the next chunk of a streamed input
        if request.request_id not in self.requests:
            for part in self.parts:
                part.before_adding(request)
        super().add_request(request)

    def _update_request_as_session(self, session: Request, *args: Any, **kwargs: Any) -> None:
        super()._update_request_as_session(session, *args, **kwargs)
        for part in self.parts:
            part.next_input(session)

    def has_requests(self) -> bool:
        """Returns whether the engine's loop has something to do."""
        return super().has_requests() or any(part.has_work for part in self.parts)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        # they may run again at once: tokens that this step schedules must not count as lost
        reset = set(self.reset_preempted_req_ids)
        for part in self.parts:
            part.before_schedule(reset)
        scheduler_output = super().schedule(*args, **kwargs)
        for part in self.parts:
            part.scheduled(scheduler_output, reset)
        return scheduler_output

    def _ec_transfer_pending(self, request: Request, num_computed_tokens: int) -> bool:
        """Returns True to make vLLM skip a waiting request in this step. Its cached blocks are known by then."""
        if super()._ec_transfer_pending(request, num_computed_tokens):
            return True
        seats = self.max_num_active_reqs - self.num_waiting_for_streaming_input - len(self.running)
        return any(policy.passes_over(request, seats) for policy in self.block_policies.members)

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Schedules the rest of a picture that must not be cut as a whole if its beginning is in the prefix cache."""
        end = num_computed_tokens + num_new_tokens
        if self.scheduler_config.disable_chunked_mm_input and any(
            place.offset < num_computed_tokens < end < place.offset + place.length
            for place in (feature.mm_position for feature in request.mm_features)
        ):
            num_new_tokens = 0
        return super()._try_schedule_encoder_inputs(request, num_computed_tokens, num_new_tokens, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        for part in self.parts:
            part.before_freeing(request)
        for policy in self.block_policies.members:
            policy.ended(request)
        return super()._free_request(request, *args, **kwargs)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        for part in self.parts:
            part.finished()
        return finished

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> Any:
        if reset_running_requests:
            # they are about to be preempted, and no block may be in use then
            for part in self.parts:
                part.before_preempting([request.request_id for request in self.running])
        return super().reset_prefix_cache(reset_running_requests, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        forget_uncomputed_blocks(self.kv_cache_manager, request)
        for policy in self.block_policies.members:
            policy.preempted(request, self.kv_cache_manager.get_blocks(request.request_id).blocks)
        super()._preempt_request(request, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        for part in self.parts:
            part.before_output(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for part in self.parts:
            part.after_output(scheduler_output, model_runner_output)
        for part in self.parts:
            part.before_answers(outputs)
        return outputs


class UcmAsyncScheduler(UcmScheduler, AsyncScheduler):
    """Asynchronous scheduling."""

    def _handle_invalid_blocks(self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        """Handles blocks that were not loaded within a step. Computed tokens of requests exclude all steps in flight:
        the next step was planned before the failure was known, including requests that found such a block in the prefix
        cache.
        """
        in_flight = {request.request_id: request.num_in_flight_tokens for request in self.running}
        failed = super()._handle_invalid_blocks(invalid_block_ids, in_flight)
        for request_id in failed:
            drop_steps_in_flight(self.requests[request_id])
        return failed
