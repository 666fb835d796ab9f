"""Drafts with asynchronous scheduling: the scheduler has placeholders for them, and the host may not know them yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
from vllm_gaudi_ucm.sampling.host_copies import HostCopies
from vllm_gaudi_ucm.vllm_api.sampling import strip_speculative_padding

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
    from vllm_gaudi_ucm.observability.host_work import HostWork
    from vllm_gaudi_ucm.sampling.sampling import Grammar
    from vllm_gaudi_ucm.vllm_api.steps import DraftTokenIds, SchedulerOutput


class DraftsAhead:
    """The drafts that the last step with tokens proposed.

    Drafts of a draft model stay on the device: -1 - p stands for the draft at place p of `carried`, also in the request
    table. The next forward reads them there, and the host when that step's own tokens are read.

    Args:
        carried: memory that forwards read.
    """

    def __init__(self, carried: CarriedTokens, host: HostWork) -> None:
        self._carried = carried
        self._host = host
        self._proposed: dict[str, list[int]] = {}
        self._count = 0
        self._copies: HostCopies | None = None
        self._known: list[int] | None = None

    def begin(self) -> None:
        """New drafts take the places of the last ones, which have been read."""
        self._count, self._copies, self._known = 0, None, None

    def put(self, tokens: torch.Tensor) -> list[int]:
        """Stores a draft of each of some requests, int64 [requests]; returns their placeholders."""
        first, self._count = self._count, self._count + len(tokens)
        self._carried.put(tokens, first)
        return [-1 - place for place in range(first, self._count)]

    def end(self) -> None:
        """All have been put."""
        if self._count:
            self._copies = HostCopies([self._carried.tokens[: self._count]])

    def proposed(self, drafts: DraftTokenIds) -> None:
        """Returns the drafts proposed by the last step. A request that was not in it has none any more."""
        self._proposed = dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True))

    def of_step(self, scheduler_output: SchedulerOutput) -> StepDrafts:
        """Returns the drafts that a step verifies, instead of the scheduler's placeholders."""
        return StepDrafts.from_scheduler_output(scheduler_output, self._proposed)

    def read(self, drafts: Mapping[str, Sequence[int]], *, early: bool = False) -> dict[str, list[int]]:
        """Reads drafts of requests, as tokens. early: no earlier wait covered the forward that read them."""
        return {request_id: [self._token(one, early) for one in some] for request_id, some in drafts.items()}

    def verified(self, drafts: StepDrafts, grammar: Grammar | None) -> StepDrafts:
        """Returns the drafts that a step's tokens are compared with. A request with a grammar has only drafts for which
        its bitmask was made: the scheduler got them, and marked where they leave the grammar.
        """
        tokens = self.read(drafts.tokens)
        if grammar is not None:
            told = grammar.scheduler_output.scheduled_spec_decode_tokens
            for request_id in grammar.output.structured_output_request_ids:
                if request_id in tokens:
                    tokens[request_id] = strip_speculative_padding(told[request_id])
        return StepDrafts(tokens, drafts.num_scheduled)

    def _token(self, draft: int, early: bool) -> int:
        if draft >= 0:
            return draft
        if self._known is None:
            assert self._copies is not None, "a draft that was never put"
            if early:
                self._host.waited("drafts of a model")
            (copy,) = self._copies.read()
            self._known = copy.tolist()
        return self._known[-1 - draft]
