"""One step: scheduler output in, sampled tokens out, and a record of what it was."""

from __future__ import annotations

import time
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import NO_REMAINDERS, BatchInput, SteadyPlanner, UnifiedPlan
from vllm_gaudi_ucm.batch.request_table import LiveRequest, RequestTable, in_slot_order
from vllm_gaudi_ucm.execution.execution import Execution, StepShape
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.observability.phase_log import StepRecord
from vllm_gaudi_ucm.observability.step_clock import StepClock
from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
from vllm_gaudi_ucm.protocol.warm_up_orders import WarmUpState, attach_warm_up_state, orders_warm_up
from vllm_gaudi_ucm.runner.computed_step import Computed, ComputedStep
from vllm_gaudi_ucm.runner.steps_ahead import StepOutput, StepsAhead, VerifiedLater
from vllm_gaudi_ucm.sampling.sampling import Grammar
from vllm_gaudi_ucm.sampling.tokens_in_flight import SampledTokens
from vllm_gaudi_ucm.sparse.selection.selection_state import DENSE_STEP
from vllm_gaudi_ucm.speculation.proposer import DraftProposer, SampledStep, wanted_drafts
from vllm_gaudi_ucm.speculation.verification import StepLogits, Verification, grammar_at
from vllm_gaudi_ucm.vllm_api.steps import DraftTokenIds, LogprobsTensors, ModelRunnerOutput, drafts_to_propose

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.group_planner import GroupPlanner
    from vllm_gaudi_ucm.distributed.lockstep import Lockstep
    from vllm_gaudi_ucm.execution.divided_logits import DividedLogits
    from vllm_gaudi_ucm.memory.memory_worker import MemoryWorker
    from vllm_gaudi_ucm.observability.phase_log import PhaseLog
    from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
    from vllm_gaudi_ucm.runner.kv_transfer import KvTransfer
    from vllm_gaudi_ucm.runner.static_shapes import StaticShapes
    from vllm_gaudi_ucm.runner.step_check import StepCheck
    from vllm_gaudi_ucm.sampling.prompt_logprobs import PromptLogprobs
    from vllm_gaudi_ucm.sampling.sampling import NanCounter, SamplingBatch, SlotSampler
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker
    from vllm_gaudi_ucm.vllm_api.steps import GrammarOutput, SchedulerOutput


def step_record(clock: StepClock, step: int, plan: UnifiedPlan, shape: StepShape, block_size: int) -> StepRecord:
    """What a step was. block_size: tokens per block; selected blocks are full."""
    (plan_ms, forward_ms, sample_ms), chosen = clock.milliseconds, plan.selection
    return StepRecord(
        step=step,
        bucket=shape.true,
        padded=shape.padded,
        requests=len(plan.requests),
        prompts=len(plan.requests) - plan.num_single,
        tokens=plan.num_rows,
        causal_pairs=0 if plan.causal is None else plan.causal.pairs(),
        shared_pairs=0 if plan.shared is None else plan.shared.pairs(plan.row_requests),
        unique_pairs=0 if plan.unique is None else int((plan.unique.hi - np.maximum(plan.unique.lo, 0)).sum()),
        plan_ms=plan_ms,
        forward_ms=forward_ms,
        sample_ms=sample_ms,
        selected_pairs=0 if chosen is None else int(chosen.counts @ chosen.num_rows) * block_size,
        sparse=0 if chosen is None else len(chosen.counts),
        tail=int(shape.remainder),
        time=time.time(),
    )


NO_BLOCKS = np.zeros(0, np.int64)
TOO_MANY_BLOCKS = "more shared blocks than ucm.graphs.max_shared_blocks, or ranges than the largest bucket holds"
PARTIAL_LOAD = "what is left of a prompt that was loaded in part runs alone"


@dataclass
class StepRunner:
    """Runs steps with what an engine has once its KV cache is allocated; None is what it does not use.

    requests: the live ones. sampling: their parameters. static: graphs; without them steps run at their true shapes.
    host: counts what steps wait for, and what they do on the host. samples: whether this is the last stage of a
    pipeline, or all of the model; another stage has no logits, and gets sampled tokens from the scheduler. ahead: with
    asynchronous scheduling, the steps whose tokens are not read yet. lockstep: the engines that share out experts.
    """

    requests: RequestTable
    sampling: SamplingBatch
    planner: SteadyPlanner | GroupPlanner
    execution: Execution
    sampler: SlotSampler
    prompt_logprobs: PromptLogprobs
    nans: NanCounter
    phase_log: PhaseLog
    metrics: StepMetrics
    block_size: int
    static: StaticShapes | None = None
    transfer: KvTransfer | None = None
    sparse: SparseWorker | None = None
    proposer: DraftProposer | None = None
    verification: Verification | None = None
    memory: MemoryWorker | None = None
    check: StepCheck | None = None
    host: HostWork = field(default_factory=HostWork)
    samples: bool = True
    ahead: StepsAhead | None = None
    lockstep: Lockstep | None = None

    def __post_init__(self) -> None:
        self._computed: ComputedStep | None = None
        self._drafts: DraftTokenIds | None = None
        self._drafts_ahead = None if self.ahead is None else self.ahead.drafts
        self._followed_by = self.static if self.static is not None and self.static.follows_steps else None

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Computes a step up to its logits. None: `sample_tokens` gives the output."""
        if self._followed_by is not None:
            # may wait for a graph that is being warmed, which is no part of the step's times
            self._followed_by.begin_step()
        if self.ahead is not None:
            self.ahead.begin_step(scheduler_output)
        clock = StepClock()
        restored = NO_BLOCKS if self.memory is None else self.memory.begin_step(scheduler_output)
        if self.check is not None:
            self.check.begin(scheduler_output)
        self.requests.update(scheduler_output)
        if self.sparse is not None:
            self.sparse.update(scheduler_output)
            if len(restored):
                self.sparse.loaded(restored, NO_BLOCKS)
        if self.transfer is not None:
            self.transfer.begin(scheduler_output)
            clock.skip(self.transfer.work.last_seconds)
            if self.sparse is not None:
                summarised = self.transfer.take_summarised_blocks()
                self.sparse.loaded(self.transfer.loaded_blocks(scheduler_output), summarised)
        if not scheduler_output.total_num_scheduled_tokens:
            transferred = None if self.transfer is None else self.transfer.finish(rests=not self.ahead)
            output = ModelRunnerOutput.with_kv_conn_output_only(transferred)
            if orders_warm_up(scheduler_output):
                output = copy(output)
                attach_warm_up_state(output, WarmUpState(0) if self.static is None else self.static.warm_next())
            self._end_step()
            return output
        drafts, verified = StepDrafts({}, scheduler_output.num_scheduled_tokens), None
        if scheduler_output.scheduled_spec_decode_tokens:
            drafts = (self._drafts_ahead or StepDrafts).of(scheduler_output)
            self.requests.write_drafts(drafts.tokens)
        requests, batch = self.requests.scheduled(drafts.num_scheduled)
        if self.sparse is not None:
            self.sparse.decide(scheduler_output, drafts, requests, batch)
        yields = batch.num_computed + batch.num_scheduled >= batch.num_tokens
        if self.samples:
            self.sampling.sync([requests[index] for index in yields.nonzero()[0].tolist()])
        if drafts.tokens:
            # static shapes have no graph that gathers rows
            verified = StepLogits(self.execution, drafts, self.static is None, self.sampling.wants_likeliest)
        step = ComputedStep(scheduler_output, requests, batch, yields, drafts, verified)
        divisions = self._divide(scheduler_output, requests, batch)
        if self.lockstep is not None:
            self.lockstep.begin(len(divisions))
        if len(divisions) == 1:
            self._compute(step, requests, batch, clock, divided=False)
        else:
            for index in divisions:
                self._compute(step, [requests[i] for i in index.tolist()], batch.take(index), clock, divided=True)
                clock = StepClock()
        if self.lockstep is not None:
            self.lockstep.finish(self.execution.follow)
        self._computed = step
        return None

    @torch.inference_mode()
    def execute_dummy(self) -> None:
        """A step without requests: takes part in those of other engines, where some share out experts."""
        if self.lockstep is not None:
            self.lockstep.begin(0)
            self.execution.follow()
            self.lockstep.finish(self.execution.follow)

    def _divide(
        self, scheduler_output: SchedulerOutput, requests: list[LiveRequest], batch: BatchInput
    ) -> list[NDArray[np.int64]]:
        remainders = NO_REMAINDERS if self.sparse is None else self.sparse.remainders(scheduler_output, requests, batch)
        divisions = self.execution.divide(batch, remainders)
        if self.static is not None and len(divisions) > 1:
            self.static.bypassed(f"step divided: {PARTIAL_LOAD if len(remainders) else TOO_MANY_BLOCKS}")
        return divisions

    def _compute(
        self, step: ComputedStep, members: list[LiveRequest], batch: BatchInput, clock: StepClock, divided: bool
    ) -> None:
        """Runs a step, or one division of it, and keeps its logits in the order of the sampler's slots."""
        selection = DENSE_STEP
        if self.sparse is not None:
            selection = self.sparse.step(step.scheduler_output, step.drafts, members, batch)
        plan, slots = self.planner.plan(batch, selection.input), NO_BLOCKS
        if self.samples:
            plan, slots = in_slot_order(plan, members, self.sampling.slots)
        token_ids = self.requests.tokens_at(members, plan.requests[plan.row_requests], plan.positions)
        shape = self.execution.stage(plan, token_ids, selection.summary_blocks)
        if self.check is not None:
            self.check.shape(shape, plan.selection)
        clock.planned()
        if self.sparse is not None:
            self.sparse.method.execute_begin(plan)
        self.execution.forward()
        if self.sparse is not None:
            self.sparse.method.execute_finished()
        if self.samples:
            step.prompt_logprobs.update(self._score_prompts(members, plan))
            self._compute_logits(step, members, plan, slots, divided)
        clock.computed()
        step.divisions.append(Computed(plan, shape, clock))

    def _compute_logits(
        self,
        step: ComputedStep,
        members: list[LiveRequest],
        plan: UnifiedPlan,
        slots: NDArray[np.int64],
        divided: bool,
    ) -> None:
        """Of the rows that yield tokens; slots: int64, the sampler's slot of each."""
        if step.verified is None:
            step.logits = self.execution.logits(plan.logits_rows)
            if divided:
                step.logits = self._divided_logits.put(step.logits, slots, len(self.sampling.slots))
            return
        yielding = [members[index] for index in plan.logits_requests.tolist()]
        if divided:
            put_at = self._divided_logits
            step.verified.compute_division(yielding, plan.logits_rows, slots, put_at, len(self.sampling.slots))
        else:
            step.verified.compute(yielding, plan.logits_rows)

    @property
    def _divided_logits(self) -> DividedLogits:
        assert self.static is not None, "only static shapes divide steps"
        return self.static.divided_logits

    def _sample(self, step: ComputedStep, grammar: Grammar | None) -> SampledTokens:
        if not self.samples:
            return SampledTokens([], None)
        if step.verified is not None:
            assert self.verification is not None, "drafts without speculative decoding"
            ahead = self._drafts_ahead
            drafts = step.drafts if ahead is None else ahead.verified(step.drafts, grammar)
            return self.verification.sample(step.verified, drafts, grammar)
        assert step.logits is not None
        # the scheduler may have counted drafts where there are none
        allowed = None if grammar is None else grammar_at(grammar, 0, self.sampling.req_ids)
        return self.sampler.sample(step.logits, allowed)

    def _sample_ahead(self, step: ComputedStep, grammar: Grammar | None, ahead: StepsAhead) -> StepOutput:
        """Queues the sampling; the step ends when its tokens are read."""
        assert step.logits is not None
        clock, sampled_ids = step.divisions[-1].clock, self.sampling.req_ids
        # a wait for the step before is that step's
        tokens = self.sampler.begin(step.logits, grammar, ahead.carried, lambda: clock.skip(ahead.settle()))
        if self.check is not None:
            self.check.tokens(tokens.look().tokens)
        self._sampled(step)
        # no kernel of the step is still to be launched, and the next step's loads and saves may be told
        self._finish_transfer(step)

        def finish(sampled: SampledTokens, waited: float) -> ModelRunnerOutput:
            clock.waited(waited)
            return self._finished(step, sampled_ids, sampled)

        return ahead.add(tokens, finish, step)

    def _verify_later(self, step: ComputedStep, grammar: Grammar | None, ahead: StepsAhead) -> StepOutput:
        """Samples the step and makes the next drafts when its tokens are read, before the next step is planned."""
        clock, sampled_ids, queued = step.divisions[-1].clock, self.sampling.req_ids, time.perf_counter()

        def sample() -> SampledTokens:
            clock.skip(time.perf_counter() - queued)
            sampled = self._sample(step, grammar)
            self._propose(step)
            self._sampled(step)
            self._finish_transfer(step)
            return sampled

        return ahead.add(VerifiedLater(sample), lambda sampled, _: self._finished(step, sampled_ids, sampled), step)

    def _finished(self, step: ComputedStep, sampled_ids: list[str], sampled: SampledTokens) -> ModelRunnerOutput:
        if self.ahead is None:
            self._record(step)
        else:
            self.ahead.later(lambda: self._record(step))
        output = _output(step, sampled_ids, sampled)
        output.kv_connector_output = step.transferred
        if self.memory is not None:
            self.memory.attach_report(output)
        if self.sparse is not None:
            self.sparse.finished(step.drafts, output)
        return output

    def _sampled(self, step: ComputedStep) -> None:
        for computed in step.divisions:
            computed.clock.sampled(took_part=computed is step.divisions[-1])
        step.host, step.nans = self.host.take(), self.nans.take()
        if self.memory is not None:
            step.moved = self.memory.take_work()

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | StepOutput:
        """Samples the step that `execute_model` computed, and writes the tokens back to the request table."""
        step, self._computed = self._computed, None
        assert step is not None, "sample_tokens without a computed step"
        grammar = None if grammar_output is None else Grammar(step.scheduler_output, grammar_output)
        sampled_ids = self.sampling.req_ids
        if self.check is not None and step.logits is not None:
            self.check.logits(step.logits)
        if self.ahead is not None and not self.ahead.verifies_at_once:
            later = self._sample_ahead if self._drafts_ahead is None else self._verify_later
            return later(step, grammar, self.ahead)
        sampled = self._sample(step, grammar)
        if self.check is not None and self.samples:
            self.check.tokens(sampled.tokens)
        self._propose(step)
        self._sampled(step)
        self._finish_transfer(step)
        output = self._finished(step, sampled_ids, sampled)
        if self.sparse is not None and self.check is not None:
            self.check.offload(output)
        self._end_step()
        return output

    def _end_step(self) -> None:
        if self._followed_by is not None and not self.ahead:  # steps ahead end when they are read
            self._followed_by.end_step()

    def _finish_transfer(self, step: ComputedStep) -> None:
        """After the drafts: they read and write blocks, too. Before the next step begins."""
        if self.transfer is not None:
            self.transfer.computed()
            step.transferred, step.transfer = self.transfer.finish(), self.transfer.take_work()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts that the last step proposed for the next one, once."""
        if self._drafts_ahead is not None:
            # the scheduler asks for those of the step that is computed, to make a grammar's bitmask of them
            assert self._computed is not None, "drafts are asked for without a step that verifies them"
            found = self._drafts_ahead.read(self._computed.drafts.tokens, early=True)
            return DraftTokenIds(list(found), list(found.values()))
        drafts, self._drafts = self._drafts, None
        return drafts

    def _propose(self, step: ComputedStep) -> None:
        if self.proposer is None:
            return
        num_drafts = drafts_to_propose(step.scheduler_output)
        wanted = wanted_drafts(step.requests, step.yields, self.requests, num_drafts)
        drafts = self.proposer.propose(SampledStep(step.requests, step.batch, step.yields, wanted))
        self._drafts = DraftTokenIds([request.request_id for request in step.requests], drafts)
        if self._drafts_ahead is not None:
            self._drafts_ahead.proposed(self._drafts)

    def _record(self, step: ComputedStep) -> None:
        """Every division ran in a shape of its own; sampling, and blocks that moved, belong to the last."""
        for computed in step.divisions:
            number, shape = self.phase_log.summary.steps, computed.shape
            record = step_record(computed.clock, number, computed.plan, shape, self.block_size)
            if computed is step.divisions[-1]:
                record = record if step.transfer is None else step.transfer.noted_in(record)
                moved: dict[str, Any] = {**step.moved}
                record = replace(record, host_reads=step.host.reads, host_stages=step.host.stages, **moved)
            self.phase_log.append(record)
            self.metrics.step(record.bucket, record.padded, shape.remainder)
            self.metrics.times(record.plan_ms, record.forward_ms, record.sample_ms)
        if self.sparse is not None:
            self.sparse.report()

    def _score_prompts(self, requests: list[LiveRequest], plan: UnifiedPlan) -> dict[str, LogprobsTensors | None]:
        scores: dict[str, LogprobsTensors | None] = {}
        for flat, index in enumerate(plan.requests.tolist()):
            request = requests[index]
            if request.wants_prompt_logprobs:
                if self.static is not None:
                    self.static.bypassed("prompt logprobs on host")
                start, stop = plan.query_start[flat : flat + 2].tolist()
                found = self.prompt_logprobs.score(request, range(start, stop), int(plan.positions[start]))
                if found is not None:
                    scores[request.request_id] = found
        return scores


def _output(step: ComputedStep, sampled_ids: list[str], sampled: SampledTokens) -> ModelRunnerOutput:
    """Requests in the sampler's order first, so that a request's index is its entry of tokens and logprobs."""
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
