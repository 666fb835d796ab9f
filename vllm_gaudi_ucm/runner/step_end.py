"""Ends a computed step: at once, or when the engine reads its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.runner.steps_ahead import StepOutput, StepsAhead, VerifiedLater
from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput

if TYPE_CHECKING:
    from vllm_gaudi_ucm.runner.computed_step import ComputedStep
    from vllm_gaudi_ucm.runner.parts import WorkerPart
    from vllm_gaudi_ucm.runner.step_sampler import NoSampler
    from vllm_gaudi_ucm.sampling.sampling import Grammar
    from vllm_gaudi_ucm.sampling.tokens_in_flight import SampledTokens


class StepEnd:
    """Samples steps and makes their output within one call."""

    def __init__(self, sampler: NoSampler, parts: WorkerPart) -> None:
        self._sampler = sampler
        self._parts = parts

    @property
    def steps_in_flight(self) -> bool:
        """Returns whether the engine has yet to read steps that have not ended."""
        return False

    def end(self, step: ComputedStep, grammar: Grammar | None) -> ModelRunnerOutput | StepOutput:
        sampled_ids = self._sampler.req_ids
        self._parts.before_sampling(step)
        sampled = self._sampler.sample(step, grammar)
        self._tell_sampled(step, lambda: sampled.tokens)
        output = self._finished(step, sampled_ids, sampled)
        self._parts.end_step()
        return output

    def _tell_sampled(self, step: ComputedStep, tokens: Callable[[], list[list[int]]]) -> None:
        self._parts.after_sampling(step, tokens)
        step.sampled(self._sampler.take_nans())
        self._parts.step_computed(step)

    def _finished(self, step: ComputedStep, sampled_ids: list[str], sampled: SampledTokens) -> ModelRunnerOutput:
        self._report_later(step)
        output = step_output(step, sampled_ids, sampled)
        self._parts.before_output(step, output)
        return output

    def _report_later(self, step: ComputedStep) -> None:
        self._report(step)

    def _report(self, step: ComputedStep) -> None:
        self._parts.report(step)


class EndInWorker(StepEnd):
    """Ends steps with drafts within one call, in a worker process; the engine schedules in the meantime. The records of
    the steps are written once the device has the next step.
    """

    def __init__(self, sampler: NoSampler, parts: WorkerPart, ahead: StepsAhead) -> None:
        super().__init__(sampler, parts)
        self._ahead = ahead

    @property
    def steps_in_flight(self) -> bool:
        return bool(self._ahead)

    def _report_later(self, step: ComputedStep) -> None:
        self._ahead.later(lambda: self._report(step))


class QueuedEnd(EndInWorker):
    """Queues the sampling; the step ends when its tokens are read."""

    def end(self, step: ComputedStep, grammar: Grammar | None) -> ModelRunnerOutput | StepOutput:
        clock, sampled_ids, ahead = step.divisions[-1].clock, self._sampler.req_ids, self._ahead
        self._parts.before_sampling(step)
        # a wait for the previous step counts for that step
        tokens = self._sampler.queue(step, grammar, ahead.carried, lambda: clock.skip(ahead.settle()))
        # all kernels of the step are launched, so the loads and saves of the next step may begin
        self._tell_sampled(step, lambda: tokens.look().tokens)

        def finish(sampled: SampledTokens, waited: float) -> ModelRunnerOutput:
            clock.waited(waited)
            return self._finished(step, sampled_ids, sampled)

        return ahead.add(tokens, finish, step)


class VerifiedEnd(EndInWorker):
    """Samples a step with drafts, and makes the next drafts, when its tokens are read, before the next plan."""

    def end(self, step: ComputedStep, grammar: Grammar | None) -> ModelRunnerOutput | StepOutput:
        clock, sampled_ids, queued = step.divisions[-1].clock, self._sampler.req_ids, time.perf_counter()

        def sample() -> SampledTokens:
            clock.skip(time.perf_counter() - queued)
            self._parts.before_sampling(step)
            sampled = self._sampler.sample(step, grammar)
            self._tell_sampled(step, lambda: sampled.tokens)
            return sampled

        later = VerifiedLater(sample)
        return self._ahead.add(later, lambda sampled, _: self._finished(step, sampled_ids, sampled), step)


def make_end(sampler: NoSampler, parts: WorkerPart, ahead: StepsAhead | None) -> StepEnd:
    """Chooses how steps end. ahead: steps in flight, with async scheduling."""
    if ahead is None:
        return StepEnd(sampler, parts)
    if ahead.verifies_at_once:
        return EndInWorker(sampler, parts, ahead)
    return (QueuedEnd if ahead.drafts is None else VerifiedEnd)(sampler, parts, ahead)


def step_output(step: ComputedStep, sampled_ids: list[str], sampled: SampledTokens) -> ModelRunnerOutput:
    """Returns the output: requests in the sampler's order first, so their index also applies to tokens and logprobs."""
    without = set(step.scheduler_output.num_scheduled_tokens).difference(sampled_ids)
    req_ids = sampled_ids + [request.request_id for request in step.requests if request.request_id in without]
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(req_ids)},
        sampled_token_ids=sampled.tokens + [[] for _ in without],
        logprobs=sampled.logprobs,
        prompt_logprobs_dict=step.prompt_logprobs,
        num_nans_in_logits=step.nans,
    )
