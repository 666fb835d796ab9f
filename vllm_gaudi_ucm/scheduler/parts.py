"""The parts of our scheduler: a sparse method, KV offload, prefetch for waiting requests, pictures sent again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.protocol.attachments import (
    attach_choice_cost,
    attach_items,
    attach_sparse_ids,
    attach_sparse_meta,
    buckets_of,
    computed_tokens,
    failures_of,
    report_of,
    verified_drafts,
)
from vllm_gaudi_ucm.protocol.memory_orders import MemoryOrders, attach_memory_orders
from vllm_gaudi_ucm.protocol.offload import OffloadReport
from vllm_gaudi_ucm.scheduler.choice_cost import register_buckets
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.options import read_extra_args
from vllm_gaudi_ucm.vllm_api.blocks import (
    drop_sampled_tokens,
    fail_request,
    isolate_blocks,
    pool_nothing,
    release_reservations,
    share_blocks,
    wait_for_blocks_again,
)
from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, Request, RequestStatus, SchedulerOutput

if TYPE_CHECKING:
    from vllm_gaudi_ucm.block_policies.policies import BlockPolicies
    from vllm_gaudi_ucm.connector.connector import UcmConnector
    from vllm_gaudi_ucm.memory_mode.scheduler_side import Fetched, OffloadScheduler
    from vllm_gaudi_ucm.protocol.sparse_meta import SparseMeta
    from vllm_gaudi_ucm.sparse.base import UcmSparseBase
    from vllm_gaudi_ucm.vllm_api.scheduling import EngineCoreOutputs, Scheduler

logger = plugin_logger(__name__)

_WITHOUT_BLOCKS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)

Fetch = Callable[[str, "Fetched"], None]
"""(request id, blocks) -> makes our connector load blocks that it left in its store."""


class SchedulerPart:
    """Hooks around vLLM's scheduling; each does nothing unless a part defines it.

    Args:
        scheduler: vLLM's scheduler, whose queues the part reads.
    """

    method: UcmSparseBase | None = None
    offload: OffloadScheduler | None = None

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def has_work(self) -> bool:
        """Returns whether steps are needed even if there are no requests."""
        return False

    def before_adding(self, request: Request) -> None:
        """Called when a request arrives that the scheduler does not know yet."""

    def next_input(self, session: Request) -> None:
        """Called when a session of streamed inputs has the prompt and the parameters of its next input."""

    def before_schedule(self, reset: Collection[str]) -> None:
        """Called before a step is scheduled; reset: requests that a reset of the prefix cache has preempted."""

    def scheduled(self, scheduler_output: SchedulerOutput, reset: Collection[str]) -> None:
        """Called when a step was scheduled; reset: as in `before_schedule`."""

    def before_freeing(self, request: Request) -> None:
        """Called when a request has finished, or was aborted, and still has its blocks."""

    def finished(self) -> None:
        """Called when requests have finished, or were aborted."""

    def before_preempting(self, request_ids: Iterable[str]) -> None:
        """Called when these requests are about to be preempted outside a step."""

    def before_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Called before the scheduler takes the output of a step."""

    def after_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Called after the scheduler has taken the output of a step."""

    def before_answers(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Called last, with what the engine is about to send to each client."""


class WaitingRequests(SchedulerPart):
    """Tells our connector which requests wait, so that their blocks are prefetched before their turn. Requests whose
    blocks did not arrive reserve no room.
    """

    def __init__(self, scheduler: Scheduler, connector: UcmConnector) -> None:
        super().__init__(scheduler)
        self._connector = connector

    def next_input(self, session: Request) -> None:
        self._connector.scheduler.next_input(session)

    def before_schedule(self, reset: Collection[str]) -> None:
        self._connector.scheduler.plan_prefetch(
            request for request in self._scheduler.waiting if request.status in _WITHOUT_BLOCKS
        )

    def after_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        release_reservations(self._scheduler)


class MemorySteps(SchedulerPart):
    """Sends each worker its orders for blocks with every step."""

    def __init__(self, scheduler: Scheduler, policies: BlockPolicies) -> None:
        super().__init__(scheduler)
        self._policies = policies

    def before_schedule(self, reset: Collection[str]) -> None:
        for policy in self._policies.members:
            policy.before_step(self._scheduler)

    def scheduled(self, scheduler_output: SchedulerOutput, reset: Collection[str]) -> None:
        orders: dict[str, Any] = {}
        for policy in self._policies.members:
            orders |= policy.orders(scheduler_output)
        attach_memory_orders(scheduler_output, MemoryOrders(msgspec.structs.replace(self._policies.totals), **orders))

    def before_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        for policy in self._policies.members:
            policy.before_output(output)


class FailedRequests(SchedulerPart):
    """Ends requests that a worker could not compute, such as one whose adapter (LoRA) cannot be loaded. The client gets
    the reason as an error; what the step computed for it is neither returned nor found by other requests.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._blocks: set[int] = set()
        self._pooled: set[str] = set()

    def before_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        for request_id, reason in failures_of(output).items():
            request = self._scheduler.requests.get(request_id)
            # it may have been aborted, or have failed in the step before
            if request is not None and not request.is_finished():
                tables = self._scheduler.kv_cache_manager.get_blocks(request_id).blocks
                self._blocks.update(block.block_id for table in tables for block in table if not block.is_null)
                drop_sampled_tokens(request, output)
                fail_request(self._scheduler, request, reason)
                if request.pooling_params is not None:
                    self._pooled.add(request_id)

    def after_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        if self._blocks:
            # free now, but their hashes tell of the adapter
            self._scheduler.kv_cache_manager.evict_blocks(self._blocks)
            self._blocks = set()

    def before_answers(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        if self._pooled:
            pool_nothing(outputs, self._pooled)
            self._pooled = set()


class ResentItems(SchedulerPart):
    """vLLM sends a request without the pictures that prefix caching has found. If the request is preempted and its
    blocks are gone, the worker has to encode them after all.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._incomplete: set[str] = set()

    def scheduled(self, scheduler_output: SchedulerOutput, reset: Collection[str]) -> None:
        sent = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        for new in scheduler_output.scheduled_new_reqs:
            whole = self._scheduler.requests[new.req_id].mm_features
            # with M-RoPE the sizes of a picture are left, which its positions need
            if any(feature is not kept for feature, kept in zip(new.mm_features, whole, strict=True)):
                self._incomplete.add(new.req_id)
        self._incomplete &= self._scheduler.requests.keys()
        ordered = scheduler_output.scheduled_encoder_inputs
        attach_items(
            scheduler_output,
            {
                request_id: {number: self._scheduler.requests[request_id].mm_features[number] for number in numbers}
                for request_id, numbers in ordered.items()
                if request_id in self._incomplete and request_id not in sent
            },
        )


class SparseSteps(SchedulerPart):
    """Tells the method what happens to requests, and sends its selections with every step.

    Only this part reads from the parameters of a request whether it may be sparse. It reads them once for each input:
    keys of blocks follow from the mark of `isolate_blocks`, steps from the method's state, here or in the workers.
    """

    def __init__(self, scheduler: Scheduler, method: UcmSparseBase) -> None:
        super().__init__(scheduler)
        self.method: UcmSparseBase = method
        self._sparse: set[str] = set()

    def before_adding(self, request: Request) -> None:
        # the id may belong to a request that has finished since the last step, whose end is reported first
        self.end(request.request_id)
        if may_be_sparse(request):
            self.begin(request)
        else:
            # a block does not record what wrote it: dense requests must not find blocks that sparse steps have written
            isolate_blocks(request, "ucm dense")

    def next_input(self, session: Request) -> None:
        """Reads for each input whether it may be sparse. Blocks are a dense request's while all inputs were dense."""
        was_sparse, is_sparse = session.request_id in self._sparse, may_be_sparse(session)
        if is_sparse and was_sparse:
            # workers treat it as a new request, for which nothing is stored
            self.method.request_preempted(session.request_id)
        elif is_sparse:
            share_blocks(session)
            self.begin(session)
        elif was_sparse:
            self.end(session.request_id)

    def begin(self, request: Request) -> None:
        """Called when a request that may be sparse was added, or a session may be sparse from now on."""
        self._sparse.add(request.request_id)
        self.method.request_begin(request.request_id, request.prompt_token_ids or ())

    def end(self, request_id: str) -> None:
        """Called when a request has ended, is no longer sparse, or never began."""
        self._sparse.discard(request_id)
        self.method.request_finished_in_scheduler(request_id)

    def scheduled(self, scheduler_output: SchedulerOutput, reset: Collection[str]) -> None:
        for request_id in scheduler_output.preempted_req_ids or ():
            self.method.request_preempted(request_id)
        for request_id in self._ended(scheduler_output.finished_req_ids):
            self.end(request_id)
        attach_sparse_meta(scheduler_output, self._meta(scheduler_output, reset))

    def _meta(self, scheduler_output: SchedulerOutput, reset: Collection[str]) -> SparseMeta:
        """Returns the data that travels with the step."""
        return self.method.build_sparse_meta(scheduler_output, self._scheduler.requests)

    def before_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        register_buckets(self.method, buckets_of(output))
        if scheduler_output.scheduled_spec_decode_tokens:
            for verified in verified_drafts(scheduler_output, output, self._scheduler.requests):
                self.method.drafts_verified(*verified)

    def _ended(self, request_ids: Iterable[str]) -> list[str]:
        """Returns the ids that no later request has."""
        requests = ((request_id, self._scheduler.requests.get(request_id)) for request_id in request_ids)
        return [request_id for request_id, request in requests if request is None or request.is_finished()]


class SparseStepsAhead(SparseSteps):
    """Runs sparse steps sent before accepted drafts are known: the `LateDecisions` of each worker decides."""

    def next_input(self, session: Request) -> None:
        if may_be_sparse(session):
            share_blocks(session)
            self.begin(session)
        else:
            self.end(session.request_id)

    def begin(self, request: Request) -> None:
        """Records a request. Workers learn of it, or of an input, with its first step."""
        self._sparse.add(request.request_id)

    def end(self, request_id: str) -> None:
        """Forgets a request. Workers learn of its end with the next step."""
        self._sparse.discard(request_id)

    def scheduled(self, scheduler_output: SchedulerOutput, reset: Collection[str]) -> None:
        for request_id in self._ended(scheduler_output.finished_req_ids):
            self.end(request_id)
        attach_sparse_ids(scheduler_output, self._sparse.intersection(_new_ids(scheduler_output)))
        choosing = self.method.selecting_method
        attach_choice_cost(scheduler_output, choosing.choice_cost if isinstance(choosing, BlockSparse) else None)

    def before_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Does nothing: workers decide."""


class OffloadedSteps(SparseSteps):
    """Runs sparse steps of requests whose blocks leave the device and come back.

    A first step that has missed too much is repeated, and a request whose load failed starts over; both happen only if
    our connector leaves blocks of prompts in its store.

    Args:
        offload: decides which blocks leave and come back.
        fetch: our connector's function; None without our connector.
    """

    def __init__(
        self, scheduler: Scheduler, method: UcmSparseBase, offload: OffloadScheduler, fetch: Fetch | None = None
    ) -> None:
        super().__init__(scheduler, method)
        self.offload: OffloadScheduler = offload
        self._fetch = fetch
        self._repeated: Mapping[str, Fetched] = {}

    def begin(self, request: Request) -> None:
        super().begin(request)
        # the next chunk of a streamed input would attend to a context with gaps
        if not request.resumable:
            self.offload.begin(request.request_id)

    def end(self, request_id: str) -> None:
        super().end(request_id)
        self.offload.end(request_id)

    def before_schedule(self, reset: Collection[str]) -> None:
        self.finished()
        self.offload.preempted(reset)
        self.offload.before_scheduling(self._scheduler.requests, len(self._scheduler.running))

    def _meta(self, scheduler_output: SchedulerOutput, reset: Collection[str]) -> SparseMeta:
        meta = super()._meta(scheduler_output, reset)
        self.offload.preempted(set(scheduler_output.preempted_req_ids or ()) - set(reset))
        orders = self.offload.orders(meta.requests, self._scheduler.requests, computed_tokens(scheduler_output))
        return msgspec.structs.replace(meta, offload=orders)

    def before_freeing(self, request: Request) -> None:
        self.offload.take_back(request)

    def finished(self) -> None:
        """Ends requests that have finished: they wait for no blocks, and blocks that wait for them become free."""
        for request_id in self._ended(self._scheduler.finished_req_ids):
            self.offload.end(request_id)

    def before_preempting(self, request_ids: Iterable[str]) -> None:
        self.offload.preempted(request_ids)

    def before_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        super().before_output(scheduler_output, output)
        report = report_of(output) or OffloadReport()
        self._repeated = self.offload.take_report(report, scheduler_output.num_scheduled_tokens)
        for request_id in self._repeated:
            # the output no longer contains its tokens
            drop_sampled_tokens(self._scheduler.requests[request_id], output)

    def after_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Makes a request whose step is repeated wait for the blocks that its query needs. A request whose load has
        failed loses all of its blocks, because it has gaps.
        """
        repeated, self._repeated = self._repeated, {}
        for request_id in repeated:
            self.method.request_preempted(request_id)
        before = dict(computed_tokens(scheduler_output)) if repeated else {}
        for request_id, fetched in repeated.items():
            assert self._fetch is not None, "only our connector leaves blocks in its store"
            wait_for_blocks_again(self._scheduler, self._scheduler.requests[request_id], before[request_id])
            self._fetch(request_id, fetched)
        transfer = output.kv_connector_output
        for request_id in () if transfer is None else transfer.failed_recving:
            request = self._scheduler.requests.get(request_id)
            if request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.offload.give_up(request)
        self.finished()


def _new_ids(scheduler_output: SchedulerOutput) -> Iterator[str]:
    return (new.req_id for new in scheduler_output.scheduled_new_reqs)


def may_be_sparse(request: Request) -> bool:
    """Returns whether the parameters of a request leave it to the sparse method."""
    if request.sampling_params is None:
        return False
    try:
        return read_extra_args(request.sampling_params.extra_args)
    except ValueError as error:
        # normally refused when requests are validated; any other way in must not end the engine
        logger.warning("request %s is dense: %s", request.request_id, error)
        return False
