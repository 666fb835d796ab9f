"""The drafts of an engine's steps: drafts that a step verifies, and drafts that it proposes for the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
from vllm_gaudi_ucm.runner.parts import WorkerPart
from vllm_gaudi_ucm.speculation.proposer import DraftProposer, SampledStep, wanted_drafts
from vllm_gaudi_ucm.vllm_api.steps import DraftTokenIds, SchedulerOutput, drafts_to_propose

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.hidden_places import HiddenPlaces
    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.runner.computed_step import ComputedStep
    from vllm_gaudi_ucm.sampling.sampling import Grammar
    from vllm_gaudi_ucm.speculation.drafts_ahead import DraftsAhead


class Drafts(WorkerPart):
    """The scheduler's drafts. An engine without speculative decoding has no others, and proposes none."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    def of_step(self, scheduler_output: SchedulerOutput) -> StepDrafts:
        """Writes the drafts that a step verifies to the request table, and returns them."""
        if not scheduler_output.scheduled_spec_decode_tokens:
            return StepDrafts({}, scheduler_output.num_scheduled_tokens)
        drafts = self._scheduled(scheduler_output)
        self._table.write_drafts(drafts.tokens)
        return drafts

    def to_verify(self, drafts: StepDrafts, grammar: Grammar | None) -> StepDrafts:
        """Returns the drafts with which a step's tokens are compared."""
        return drafts

    def take_proposed(self, step: ComputedStep | None) -> DraftTokenIds | None:
        """Returns the drafts proposed by the last step, once. step: the step that is computed but not sampled yet."""
        return None

    def _scheduled(self, scheduler_output: SchedulerOutput) -> StepDrafts:
        return StepDrafts.from_scheduler_output(scheduler_output)


class HiddenStateSteps(WorkerPart):
    """Gives the rows of each step places for the hidden states that the model passes to its draft head."""

    def __init__(self, places: HiddenPlaces, num_drafts: int) -> None:
        self._places = places
        self._num_drafts = num_drafts

    def before_plan(self, step: ComputedStep) -> None:
        batch = step.batch
        assert batch.table_rows is not None, "a step of the request table"
        self._places.begin_step(batch.table_rows, batch.num_computed, batch.num_scheduled, self._num_drafts)


class ProposedDrafts(Drafts):
    """Drafts of a proposer, which the scheduler sends back with the next step."""

    def __init__(self, table: RequestTable, proposer: DraftProposer) -> None:
        super().__init__(table)
        self.proposer = proposer
        self._proposed: DraftTokenIds | None = None

    def take_proposed(self, step: ComputedStep | None) -> DraftTokenIds | None:
        drafts, self._proposed = self._proposed, None
        return drafts

    def after_sampling(self, step: ComputedStep, tokens: Callable[[], list[list[int]]]) -> None:
        num_drafts = drafts_to_propose(step.scheduler_output)
        wanted = wanted_drafts(step.requests, step.yields, self._table, num_drafts)
        drafts = self.proposer.propose(SampledStep(step.requests, step.batch, step.yields, wanted))
        self._keep(DraftTokenIds([request.request_id for request in step.requests], drafts))

    def _keep(self, drafts: DraftTokenIds) -> None:
        self._proposed = drafts


class KeptDrafts(ProposedDrafts):
    """Drafts of a proposer with async scheduling: they stay in the worker; the scheduler has placeholders."""

    def __init__(self, table: RequestTable, proposer: DraftProposer, ahead: DraftsAhead) -> None:
        super().__init__(table, proposer)
        self.ahead = ahead

    def to_verify(self, drafts: StepDrafts, grammar: Grammar | None) -> StepDrafts:
        return self.ahead.verified(drafts, grammar)

    def take_proposed(self, step: ComputedStep | None) -> DraftTokenIds | None:
        # the scheduler needs the drafts of the computed step for a grammar's bitmask
        assert step is not None, "drafts are asked for without a step that verifies them"
        found = self.ahead.read(step.drafts.tokens, early=True)
        return DraftTokenIds(list(found), list(found.values()))

    def _scheduled(self, scheduler_output: SchedulerOutput) -> StepDrafts:
        return self.ahead.of_step(scheduler_output)

    def _keep(self, drafts: DraftTokenIds) -> None:
        self.ahead.proposed(drafts)


def make_drafts(table: RequestTable, proposer: DraftProposer | None, ahead: DraftsAhead | None) -> Drafts:
    """Makes the drafts of an engine.

    proposer: None without speculative decoding. ahead: drafts kept in the worker, with async scheduling.
    """
    if proposer is None:
        return Drafts(table)
    return ProposedDrafts(table, proposer) if ahead is None else KeptDrafts(table, proposer, ahead)
