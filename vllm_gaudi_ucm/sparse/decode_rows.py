"""Which requests of a step may be sparse: decodes, and what is left of a prompt that was loaded in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.protocol.attachments import computed_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class DecodeRow(NamedTuple):
    """A decode, or a verification: one certain token and its drafts; or several certain tokens of a prompt.

    context_tokens: certain tokens that are attended, the new ones included.
    """

    request_id: str
    context_tokens: int
    num_drafts: int


HasGaps = Callable[[str, int], bool]
"""(request id, certain tokens of a step) -> whether the context has gaps and so many rows may choose from the rest."""


def no_gaps(request_id: str, num_rows: int) -> bool:
    """Without memory mode every context is whole."""
    return False


def decode_rows(
    scheduler_output: SchedulerOutput, requests: Mapping[str, Request], has_gaps: HasGaps = no_gaps
) -> Iterator[DecodeRow]:
    """The decodes of a step. A chunk of one token that does not reach the request's last token is none.

    Where the context has gaps, prompt rows cannot attend to all of it, whatever their number: they choose together,
    as a token and its drafts do.

    Under asynchronous scheduling the last tokens are not known yet, and drafts in flight may still be rejected:
    a context is then counted to the last token that is known, so that what is unsure lies in the local window.
    """
    drafts = scheduler_output.scheduled_spec_decode_tokens
    for request_id, computed in computed_tokens(scheduler_output):
        num_drafts = len(drafts.get(request_id, ()))
        certain = scheduler_output.num_scheduled_tokens[request_id] - num_drafts
        request = requests.get(request_id)
        if request is None:
            continue
        end = min(computed + certain, request.num_tokens)
        if (certain == 1 and end == request.num_tokens) or has_gaps(request_id, certain):
            yield DecodeRow(request_id, end, num_drafts)
