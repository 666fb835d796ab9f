"""Attaches data of sparse methods and KV offload to vLLM's scheduler objects, and reads it from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm_gaudi_ucm.protocol.offload import OffloadReport
    from vllm_gaudi_ucm.protocol.sparse_meta import SparseMeta
    from vllm_gaudi_ucm.vllm_api.multimodal import MultiModalFeatureSpec
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, Request, SchedulerOutput

_ATTRIBUTE = "ucm_sparse_meta"
_REPORT = "ucm_offload_report"
_BUCKETS = "ucm_buckets"
_CHOICE_COST = "ucm_choice_cost"
_SPARSE_IDS = "ucm_sparse_ids"
_FAILURES = "ucm_failures"
_ITEMS = "ucm_items"


class VerifiedDrafts(NamedTuple):
    """A request whose drafts a step has verified."""

    request_id: str
    num_drafts: int
    num_accepted: int


def attach_sparse_meta(scheduler_output: SchedulerOutput, meta: SparseMeta) -> None:
    """Sends the selections with the step; an attribute of the object is pickled with it."""
    setattr(scheduler_output, _ATTRIBUTE, meta)


def sparse_meta_of(scheduler_output: SchedulerOutput) -> SparseMeta | None:
    """The selections of a step; None if another scheduler than ours made it, or no method is on."""
    meta: SparseMeta | None = getattr(scheduler_output, _ATTRIBUTE, None)
    return meta


def attach_report(output: ModelRunnerOutput, report: OffloadReport) -> None:
    """Sends back the results of KV offload's orders with the output of a step."""
    if report:
        setattr(output, _REPORT, report)


def report_of(output: ModelRunnerOutput) -> OffloadReport | None:
    """Returns the report; None if there is none."""
    report: OffloadReport | None = getattr(output, _REPORT, None)
    return report


def attach_buckets(output: ModelRunnerOutput, buckets: object) -> None:
    """Sends the worker's `BucketSet` to the scheduler, with the output of one step."""
    setattr(output, _BUCKETS, buckets)


def buckets_of(output: ModelRunnerOutput) -> object | None:
    """Returns the buckets sent with a step; None with nearly every step."""
    buckets: object | None = getattr(output, _BUCKETS, None)
    return buckets


def attach_choice_cost(scheduler_output: SchedulerOutput, cost: object) -> None:
    """Sends the scheduler's `ChoiceCost`, or None, with a step whose sparse requests the workers decide over."""
    setattr(scheduler_output, _CHOICE_COST, cost)


def choice_cost_of(scheduler_output: SchedulerOutput) -> object | None:
    """Returns the cost of choosing blocks; None if every step with a budget is sparse."""
    cost: object | None = getattr(scheduler_output, _CHOICE_COST, None)
    return cost


def attach_sparse_ids(scheduler_output: SchedulerOutput, request_ids: Set[str]) -> None:
    """Sends which of a step's new requests may be sparse, with a step whose sparse requests the workers decide over."""
    setattr(scheduler_output, _SPARSE_IDS, request_ids)


def sparse_ids_of(scheduler_output: SchedulerOutput) -> Set[str]:
    """Returns the ids of sparse requests; empty if the step is not from our scheduler."""
    request_ids: Set[str] = getattr(scheduler_output, _SPARSE_IDS, frozenset())
    return request_ids


def attach_failures(output: ModelRunnerOutput, failures: Mapping[str, str]) -> None:
    """Sends back why requests of a step cannot go on, by their ids. The step's results for them are void."""
    if failures:
        setattr(output, _FAILURES, failures)


def failures_of(output: ModelRunnerOutput) -> Mapping[str, str]:
    """Returns why requests cannot go on; empty with nearly every step."""
    failures: Mapping[str, str] = getattr(output, _FAILURES, {})
    return failures


def attach_items(scheduler_output: SchedulerOutput, items: Mapping[str, Mapping[int, MultiModalFeatureSpec]]) -> None:
    """Sends pictures of running requests again, by request and by their number in its prompt."""
    if items:
        setattr(scheduler_output, _ITEMS, items)


def items_of(scheduler_output: SchedulerOutput) -> Mapping[str, Mapping[int, MultiModalFeatureSpec]]:
    """Returns the pictures that are sent again; empty with nearly every step."""
    items: Mapping[str, Mapping[int, MultiModalFeatureSpec]] = getattr(scheduler_output, _ITEMS, {})
    return items


def computed_tokens(scheduler_output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Id of each scheduled request, and its tokens that were computed before the step."""
    cached = scheduler_output.scheduled_cached_reqs
    new = ((request.req_id, request.num_computed_tokens) for request in scheduler_output.scheduled_new_reqs)
    return chain(new, zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def verified_drafts(
    scheduler_output: SchedulerOutput, output: ModelRunnerOutput, requests: Mapping[str, Request]
) -> Iterator[VerifiedDrafts]:
    """Returns live requests whose drafts the step has verified. Call it before the scheduler takes `output`.

    Output that was in flight when its request was preempted tells nothing about the request's current state.
    """
    for request_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
        request = requests.get(request_id)
        if request is None or request.is_finished() or request.num_stale_output_tokens:
            continue
        index = output.req_id_to_index.get(request_id)
        tokens = output.sampled_token_ids[index] if index is not None and output.sampled_token_ids else ()
        yield VerifiedDrafts(request_id, len(drafts), max(len(tokens) - 1, 0))
