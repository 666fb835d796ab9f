"""The drafts that a step verifies, as the scheduler sends them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.vllm_api.sampling import strip_speculative_padding

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.steps import SchedulerOutput


class StepDrafts(NamedTuple):
    """tokens: request id -> drafts, none of them empty. num_scheduled: request id -> rows of the step."""

    tokens: dict[str, list[int]]
    num_scheduled: dict[str, int]

    @classmethod
    def from_scheduler_output(
        cls, scheduler_output: SchedulerOutput, proposed: Mapping[str, list[int]] | None = None
    ) -> StepDrafts:
        """Returns the drafts of a step. The scheduler pads a new decode with drafts of -1, which no token equals: they
        get no rows, and count as rejected when it reads our output.

        proposed: with async scheduling, all drafts of the scheduler are such pads, and these replace them.
        """
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        if not scheduled:
            return cls({}, scheduler_output.num_scheduled_tokens)
        tokens, num_scheduled = {}, dict(scheduler_output.num_scheduled_tokens)
        for request_id, padded in scheduled.items():
            if proposed is None:
                drafts = strip_speculative_padding(padded)
            else:
                drafts = proposed.get(request_id, [])[: len(padded)]
            num_scheduled[request_id] -= len(padded) - len(drafts)
            if drafts:
                tokens[request_id] = drafts
        return cls(tokens, num_scheduled)

    def count(self, request_id: str) -> int:
        return len(self.tokens.get(request_id, ()))
