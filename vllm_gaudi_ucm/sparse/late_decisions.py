"""Decides steps of a sparse method in the worker: with asynchronous scheduling and drafts, the scheduler sends a step
before it is known how many drafts of the previous one are right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from vllm_gaudi_ucm.protocol.attachments import VerifiedDrafts, choice_cost_of, sparse_ids_of
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.choice_cost import ChoiceCost

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.batch_plan import BatchInput
    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.protocol.sparse_meta import SparseMeta
    from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
    from vllm_gaudi_ucm.sparse.base import UcmSparseBase
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, Request, SchedulerOutput


def decides_late(vllm_config: VllmConfig) -> bool:
    """Returns whether workers decide, as the platform has configured the engine."""
    return bool(vllm_config.scheduler_config.async_scheduling) and vllm_config.speculative_config is not None


class CountedRequest(NamedTuple):
    """All that a method with `decides_by_counts` reads of a request."""

    request_id: str
    num_tokens: int


class LateDecisions:
    """Lets a method of the scheduler's role decide in the worker, once the tokens of the previous step are known.

    It gets the same calls in the same order as in the engine's process with synchronous scheduling, so that its
    decisions are the same. All ranks know the same tokens and make the same decisions.

    Args:
        method: in the role SCHEDULER, with its block size set; its class decides by counts.
    """

    def __init__(self, method: UcmSparseBase) -> None:
        self._method = method
        self._sparse: set[str] = set()

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Updates the method with the changes to requests since the previous step."""
        cost, choosing = choice_cost_of(scheduler_output), self._method.selecting_method
        if isinstance(cost, ChoiceCost) and isinstance(choosing, BlockSparse) and choosing.choice_cost is None:
            choosing.register_choice_cost(cost)
        for request_id in scheduler_output.finished_req_ids:
            self._end(request_id)
        may_be_sparse = sparse_ids_of(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id not in may_be_sparse:
                self._end(new.req_id)
            elif new.req_id in self._sparse:
                # the next input of a session, or a preempted request that comes as a new one
                self._method.request_preempted(new.req_id)
            else:
                self._sparse.add(new.req_id)
                self._method.request_begin(new.req_id, new.prompt_token_ids or ())
        for request_id in scheduler_output.preempted_req_ids or ():
            self._method.request_preempted(request_id)

    def _end(self, request_id: str) -> None:
        self._sparse.discard(request_id)
        self._method.request_finished_in_scheduler(request_id)

    def decide(
        self,
        scheduler_output: SchedulerOutput,
        drafts: StepDrafts,
        requests: Sequence[LiveRequest],
        batch: BatchInput,
    ) -> SparseMeta:
        """Returns the selections of a step. drafts: those it verifies. requests, batch: as the worker computes them."""
        tokens = zip(requests, batch.num_tokens.tolist(), strict=True)
        counted = {request.request_id: CountedRequest(request.request_id, count) for request, count in tokens}
        known = _as_known(scheduler_output, drafts, requests, batch)
        return self._method.build_sparse_meta(known, cast("Mapping[str, Request]", counted))

    def verified(self, drafts: StepDrafts, output: ModelRunnerOutput) -> None:
        """Takes the output of a step that had drafts."""
        for request_id, tokens in drafts.tokens.items():
            sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
            self._method.drafts_verified(*VerifiedDrafts(request_id, len(tokens), max(len(sampled) - 1, 0)))


def _as_known(
    scheduler_output: SchedulerOutput, drafts: StepDrafts, requests: Sequence[LiveRequest], batch: BatchInput
) -> SchedulerOutput:
    """Returns the step as a scheduler that had waited for the tokens would have sent it."""
    computed = dict(zip((request.request_id for request in requests), batch.num_computed.tolist(), strict=True))
    cached = scheduler_output.scheduled_cached_reqs
    return replace(
        scheduler_output,
        scheduled_cached_reqs=replace(cached, num_computed_tokens=[computed[one] for one in cached.req_ids]),
        num_scheduled_tokens=drafts.num_scheduled,
        scheduled_spec_decode_tokens=drafts.tokens,
    )
