"""Runs one step: scheduler output in, sampled tokens out."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.observability.step_clock import StepClock
from vllm_gaudi_ucm.runner.computed_step import ComputedStep, Division
from vllm_gaudi_ucm.sampling.sampling import Grammar
from vllm_gaudi_ucm.vllm_api.steps import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import SteadyPlanner
    from vllm_gaudi_ucm.batch.group_planner import StepPlanner
    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.execution.execution import Execution
    from vllm_gaudi_ucm.runner.drafts import Drafts
    from vllm_gaudi_ucm.runner.parts import WorkerPart
    from vllm_gaudi_ucm.runner.step_end import StepEnd
    from vllm_gaudi_ucm.runner.step_sampler import NoSampler
    from vllm_gaudi_ucm.runner.steps_ahead import StepOutput


class StepRunner:
    """Runs steps with the objects of an engine after its KV cache is allocated."""

    def __init__(
        self,
        *,
        requests: RequestTable,
        planner: SteadyPlanner | StepPlanner,
        execution: Execution,
        sampler: NoSampler,
        drafts: Drafts,
        end: StepEnd,
        parts: WorkerPart,
    ) -> None:
        self.requests = requests
        self.execution = execution
        self._planner = planner
        self._sampler = sampler
        self._drafts = drafts
        self._end = end
        self._parts = parts
        self._computed: ComputedStep | None = None

    @property
    def steps_in_flight(self) -> bool:
        """Returns whether the engine has yet to read steps that have not ended."""
        return self._end.steps_in_flight

    @property
    def is_between_stages(self) -> bool:
        """Returns whether a step is computed, but not sampled yet."""
        return self._computed is not None

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | StepOutput | None:
        """Computes a step up to its logits. Returns None if `sample_tokens` returns the output."""
        self._parts.before_step(scheduler_output)
        clock = StepClock()
        self._parts.begin_step(scheduler_output)
        self.requests.update(scheduler_output)
        self._parts.requests_updated(scheduler_output, clock)
        if not scheduler_output.total_num_scheduled_tokens:
            return self._without_tokens(scheduler_output)
        drafts = self._drafts.of_step(scheduler_output)
        requests, batch = self.requests.scheduled(drafts.num_scheduled)
        yields = batch.num_computed + batch.num_scheduled >= batch.num_tokens
        step = ComputedStep(scheduler_output, requests, batch, yields, drafts)
        self._parts.before_plan(step)
        self._compute_divisions(step, clock)
        self._computed = step
        # vLLM's engine asks for no tokens of a model that pools
        return None if self._sampler.samples else self.sample_tokens(None)

    @torch.inference_mode()
    def execute_dummy(self) -> None:
        """Runs a step without requests: takes part in the steps of other engines if they share out experts."""
        self._parts.dummy_step()

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | StepOutput:
        """Samples the step that `execute_model` computed, and writes the tokens back to the request table."""
        step, self._computed = self._computed, None
        assert step is not None, "sample_tokens without a computed step"
        return self._end.end(step, None if grammar_output is None else Grammar(step.scheduler_output, grammar_output))

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Returns the drafts that the last step proposed for the next one, once."""
        return self._drafts.take_proposed(self._computed)

    def close(self) -> None:
        self._parts.close()

    def _without_tokens(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        output = copy(ModelRunnerOutput.with_kv_conn_output_only(None))
        self._parts.without_tokens(scheduler_output, output)
        self._parts.end_step()
        return output

    def _compute_divisions(self, step: ComputedStep, clock: StepClock) -> None:
        """Runs the step as a whole, or in parts that fit a shape."""
        divisions = self.execution.divide(step.batch, step.remainders)
        self._parts.before_divisions(step, len(divisions))
        if len(divisions) == 1:
            self._compute(step, Division(step.requests, step.batch, clock, is_part=False))
        else:
            for index in divisions:
                members = [step.requests[i] for i in index.tolist()]
                self._compute(step, Division(members, step.batch.take(index), clock, is_part=True))
                clock = StepClock()
        self._parts.after_divisions()

    def _compute(self, step: ComputedStep, division: Division) -> None:
        """Runs a division, and keeps its logits in the order of the sampler's slots."""
        self._parts.before_division(step, division)
        selection = division.selection
        plan = self._planner.plan(division.batch, selection.input)
        division.staged(plan, self.execution.stage(self.requests.planned(plan, selection.summary_blocks)))
        self._parts.before_forward(division)
        division.clock.planned()
        self.execution.forward()
        self._parts.after_forward(division)
        if not step.divisions:
            # the device computes meanwhile
            self._sampler.begin(step)
        plan, slots = self._sampler.in_order(plan, division.members)
        division.ordered(plan)
        self._sampler.compute_logits(step, division, slots)
        division.clock.computed()
        step.divisions.append(division)
