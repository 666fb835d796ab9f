"""Which requests of a step compute exactly one certain token, so that they may be sparse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.sparse.scheduler_contract import computed_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class DecodeRow(NamedTuple):
    """A decode, or a verification: one certain token and its drafts.

    context_tokens: certain tokens that are attended, the new one included.
    """

    request_id: str
    context_tokens: int
    num_drafts: int


def decode_rows(scheduler_output: SchedulerOutput, requests: Mapping[str, Request]) -> Iterator[DecodeRow]:
    """The decodes of a step. A chunk of one token that does not reach the request's last token is none.

    Under asynchronous scheduling the last tokens are not known yet, and drafts in flight may still be rejected:
    a context is then counted to the last token that is known, so that what is unsure lies in the local window.
    """
    drafts = scheduler_output.scheduled_spec_decode_tokens
    for request_id, computed in computed_tokens(scheduler_output):
        num_drafts = len(drafts.get(request_id, ()))
        certain = scheduler_output.num_scheduled_tokens[request_id] - num_drafts
        request = requests.get(request_id)
        if certain == 1 and request is not None and computed + 1 >= request.num_tokens:
            yield DecodeRow(request_id, request.num_tokens, num_drafts)
