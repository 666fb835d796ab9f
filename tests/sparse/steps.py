"""Steps as the scheduler role sees them, without vLLM: requests, and what is scheduled of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm_gaudi_ucm.protocol.sparse_meta import SparseMeta
from vllm_gaudi_ucm.sparse.base import UcmSparseBase

BLOCK_SIZE = 4


@dataclass
class Live:
    """A request: its tokens, and how many of them are computed."""

    request_id: str
    num_tokens: int
    computed: int = 0
    drafts: list[int] = field(default_factory=list)


def step_of(scheduled: dict[str, int], requests: dict[str, Live]) -> Any:
    """A SchedulerOutput's fields that methods read; counts include drafts."""
    return SimpleNamespace(
        num_scheduled_tokens=dict(scheduled),
        scheduled_spec_decode_tokens={name: requests[name].drafts for name in scheduled if requests[name].drafts},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(scheduled), num_computed_tokens=[requests[name].computed for name in scheduled]
        ),
    )


def decode(method: UcmSparseBase, *requests: Live) -> SparseMeta:
    """One decode of each request (with its drafts, all rejected), after which each has a token more."""
    by_id: Any = {request.request_id: request for request in requests}
    for request in requests:
        request.computed = request.num_tokens - 1
    meta = method.build_sparse_meta(
        step_of({name: 1 + len(request.drafts) for name, request in by_id.items()}, by_id), by_id
    )
    for request in requests:
        request.num_tokens += 1
    return meta
