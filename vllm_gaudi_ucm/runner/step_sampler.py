"""Turns the hidden states of a step into its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.planned_step import NO_BLOCKS
from vllm_gaudi_ucm.sampling.tokens_in_flight import SampledTokens, TokensInFlight
from vllm_gaudi_ucm.speculation.verification import StepLogits, Verification, grammar_at

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
    from vllm_gaudi_ucm.execution.divided_logits import LogitsOfParts
    from vllm_gaudi_ucm.execution.execution import Execution
    from vllm_gaudi_ucm.runner.computed_step import ComputedStep, Division
    from vllm_gaudi_ucm.runner.drafts import Drafts
    from vllm_gaudi_ucm.sampling.prompt_logprobs import PromptLogprobs
    from vllm_gaudi_ucm.sampling.sampling import Grammar, NanCounter, SlotSampler


class NoSampler:
    """The sampler of a pipeline stage without logits, which gets sampled tokens from the scheduler, or of a model that
    pools.

    Args:
        samples: whether other stages sample the step; False if the model pools.
    """

    def __init__(self, samples: bool = True) -> None:
        self.samples = samples

    @property
    def req_ids(self) -> list[str]:
        """Returns the requests that get tokens, in the order of the sampler's slots."""
        return []

    def begin(self, step: ComputedStep) -> None:
        """Prepares slots for the requests that yield tokens, once the first forward of the step is queued."""

    def in_order(self, plan: UnifiedPlan, members: list[LiveRequest]) -> tuple[UnifiedPlan, NDArray[np.int64]]:
        """Returns the plan with its logits rows in the order of the slots, and these slots, int64 [logits]."""
        return plan, NO_BLOCKS

    def compute_logits(self, step: ComputedStep, division: Division, slots: NDArray[np.int64]) -> None:
        """Computes the logits of a division that has run. slots: int64, slot of each row that yields a token."""

    def sample(self, step: ComputedStep, grammar: Grammar | None) -> SampledTokens:
        """Samples a computed step; the tokens are also written to the request table."""
        return SampledTokens([], None)

    def queue(
        self, step: ComputedStep, grammar: Grammar | None, carried: CarriedTokens, settle: Callable[[], None]
    ) -> TokensInFlight:
        """Queues the sampling of a computed step.

        carried: receives the tokens on the device. settle: makes the host read the previous step if needed.
        """
        raise NotImplementedError("asynchronous scheduling on a stage without logits")

    def take_nans(self) -> dict[str, int] | None:
        """Returns NaNs in the last step's logits by request; None if they are not counted."""
        return None


@dataclass(frozen=True)
class LogitsSource:
    """The source of the logits of steps.

    Args:
        divided: the logits of divided steps.
        at_once: whether logits of all positions are computed in one call, and gathered; static shapes have no graph for
            this.
        bypassed: called with a reason if work runs outside the graphs.
    """

    execution: Execution
    divided: LogitsOfParts
    prompt_logprobs: PromptLogprobs
    bypassed: Callable[[str], None]
    at_once: bool


class StepSampler(NoSampler):
    """Samples the slots of the requests that yield tokens.

    Args:
        nans: counts NaNs in them.
        verification: compares drafts with tokens; None without speculative decoding.
    """

    def __init__(
        self,
        slots: SlotSampler,
        nans: NanCounter,
        source: LogitsSource,
        drafts: Drafts,
        verification: Verification | None = None,
    ) -> None:
        super().__init__()
        self._slots = slots
        self._batch = slots.batch
        self._nans = nans
        self._source = source
        self._drafts = drafts
        self.verification = verification

    @property
    def req_ids(self) -> list[str]:
        return self._batch.req_ids

    def begin(self, step: ComputedStep) -> None:
        self._batch.sync([step.requests[index] for index in step.yields.nonzero()[0].tolist()])
        if step.drafts.tokens:
            likeliest = self._batch.wants_likeliest
            step.verify(StepLogits(self._source.execution, step.drafts, self._source.at_once, likeliest))

    def in_order(self, plan: UnifiedPlan, members: list[LiveRequest]) -> tuple[UnifiedPlan, NDArray[np.int64]]:
        return in_slot_order(plan, members, self._batch.slots)

    def compute_logits(self, step: ComputedStep, division: Division, slots: NDArray[np.int64]) -> None:
        self._score_prompts(step, division)
        plan, count = division.plan, len(self._batch.slots)
        if step.verified is None:
            logits = self._source.execution.logits(plan.logits_rows)
            step.computed(self._source.divided.put(logits, slots, count) if division.is_part else logits)
            return
        yielding = [division.members[index] for index in plan.logits_requests.tolist()]
        if division.is_part:
            step.verified.compute_division(yielding, plan.logits_rows, slots, self._source.divided, count)
        else:
            step.verified.compute(yielding, plan.logits_rows)

    def sample(self, step: ComputedStep, grammar: Grammar | None) -> SampledTokens:
        if step.verified is not None:
            assert self.verification is not None, "drafts without speculative decoding"
            return self.verification.sample(step.verified, self._drafts.to_verify(step.drafts, grammar), grammar)
        assert step.logits is not None
        # the scheduler may have counted drafts although there are none
        allowed = None if grammar is None else grammar_at(grammar, 0, self._batch.req_ids)
        return self._slots.sample(step.logits, allowed)

    def queue(
        self, step: ComputedStep, grammar: Grammar | None, carried: CarriedTokens, settle: Callable[[], None]
    ) -> TokensInFlight:
        assert step.logits is not None
        return self._slots.begin(step.logits, grammar, carried, settle)

    def take_nans(self) -> dict[str, int] | None:
        return self._nans.take_counts()

    def _score_prompts(self, step: ComputedStep, division: Division) -> None:
        plan = division.plan
        for flat, index in enumerate(plan.requests.tolist()):
            request = division.members[index]
            if request.wants_prompt_logprobs:
                self._source.bypassed("prompt logprobs on host")
                start, stop = plan.query_start[flat : flat + 2].tolist()
                first = int(plan.positions[start])
                found = self._source.prompt_logprobs.score(request, range(start, stop), first)
                if found is not None:
                    step.prompt_logprobs[request.request_id] = found


def in_slot_order(
    plan: UnifiedPlan, members: Sequence[LiveRequest], sampled: Sequence[LiveRequest]
) -> tuple[UnifiedPlan, NDArray[np.int64]]:
    """Returns the plan with its logits rows in the order of the sampler's slots, and these slots, int64 [logits].

    members: requests of the plan. sampled: requests that the whole step samples, by slot.
    """
    slot_of = {request: slot for slot, request in enumerate(sampled)}
    yielding = (slot_of[members[index]] for index in plan.logits_requests.tolist())
    slots = np.fromiter(yielding, np.int64, len(plan.logits_requests))
    order = np.argsort(slots)
    requests, rows = plan.logits_requests[order], plan.logits_rows[order]
    return plan._replace(logits_requests=requests, logits_rows=rows), slots[order]
