"""The work of a worker around its steps, with one part for each enabled feature."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vllm_gaudi_ucm.batch.planned_step import NO_BLOCKS
from vllm_gaudi_ucm.observability.phase_log import PhaseLog
from vllm_gaudi_ucm.observability.step_record import StepRecord
from vllm_gaudi_ucm.protocol.warm_up_orders import WarmUpState, attach_warm_up_state, orders_warm_up
from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
    from vllm_gaudi_ucm.distributed.lockstep import Lockstep
    from vllm_gaudi_ucm.execution.execution import StepShape
    from vllm_gaudi_ucm.memory.memory_worker import MemoryWorker
    from vllm_gaudi_ucm.observability.host_work import HostWork
    from vllm_gaudi_ucm.observability.step_clock import StepClock
    from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
    from vllm_gaudi_ucm.runner.computed_step import ComputedStep, Division
    from vllm_gaudi_ucm.runner.kv_transfer import KvTransfer
    from vllm_gaudi_ucm.runner.static_shapes import StaticShapes
    from vllm_gaudi_ucm.runner.steps_ahead import StepsAhead
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker

TOO_MANY_BLOCKS = (
    "more shared blocks than ucm.graphs.max_shared_blocks, more ranges than the largest bucket holds, or a state that "
    "another request of the step computes"
)
PARTIAL_LOAD = "what is left of a prompt that was loaded in part runs alone"


class WorkerPart:
    """Hooks around a step in the worker, in the order in which a step calls them. A hook does nothing unless a part
    defines it.

    A step without tokens calls only `before_step`, `begin_step`, `requests_updated`, `without_tokens` and `end_step`.
    """

    def before_step(self, scheduler_output: SchedulerOutput) -> None:
        """Waits for prerequisites of a step, before the step's times begin."""

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Acts before the request table is updated."""

    def requests_updated(self, scheduler_output: SchedulerOutput, clock: StepClock) -> None:
        """Acts once the request table is updated. clock: clock of the step, which may leave out time."""

    def without_tokens(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Completes the output of a step without tokens."""

    def before_plan(self, step: ComputedStep) -> None:
        """Acts before any division of the step is planned."""

    def before_divisions(self, step: ComputedStep, count: int) -> None:
        """Acts before the first of `count` forwards."""

    def before_division(self, step: ComputedStep, division: Division) -> None:
        """Acts before a division is planned."""

    def before_forward(self, division: Division) -> None:
        """Acts once a division is staged."""

    def after_forward(self, division: Division) -> None:
        """Acts once the forward of a division is queued, before its logits are queued."""

    def after_divisions(self) -> None:
        """Acts after the last forward and its logits."""

    def before_sampling(self, step: ComputedStep) -> None:
        """Acts before the step's tokens are sampled, or their sampling is queued."""

    def after_sampling(self, step: ComputedStep, tokens: Callable[[], list[list[int]]]) -> None:
        """Acts once tokens are sampled, or their sampling is queued.

        tokens: returns the tokens of each request, in the order of the sampler; may wait for the device.
        """

    def step_computed(self, step: ComputedStep) -> None:
        """Acts once all kernels of the step and of its drafts are launched."""

    def report(self, step: ComputedStep) -> None:
        """Writes figures of a step; with async scheduling, once the device has the next step to compute."""

    def before_output(self, step: ComputedStep, output: ModelRunnerOutput) -> None:
        """Adds the part's data for the scheduler to the step's output."""

    def end_step(self) -> None:
        """Acts when the call that ends a step returns its output. Steps in flight end when they are read."""

    def dummy_step(self) -> None:
        """Takes part in a step of other engines."""

    def close(self) -> None:
        """Ends background work; a second call has no effect."""


HOOKS = tuple(name for name in vars(WorkerPart) if not name.startswith("_"))


class AllParts(WorkerPart):
    """The parts of a worker as one. Each hook calls the parts that define it, one after the other, in the given order.

    The calls are bound once, because a step has many hooks and most parts define few of them.
    """

    def __init__(self, parts: Sequence[WorkerPart]) -> None:
        for name in HOOKS:
            is_empty = getattr(WorkerPart, name)
            defined = [getattr(part, name) for part in parts if getattr(type(part), name) is not is_empty]
            setattr(self, name, _in_turn(defined))


def _in_turn(calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
    """Returns a function that makes all calls with its arguments; a single call stands for itself."""

    def call_all(*args: object) -> None:
        for call in calls:
            call(*args)

    return calls[0] if len(calls) == 1 else call_all


class StaticSteps(WorkerPart):
    """Warms graphs between steps, and counts steps that do not run in one graph.

    Args:
        in_flight: the steps that the engine has not read yet.
    """

    def __init__(self, static: StaticShapes, in_flight: Sized = ()) -> None:
        self._static = static
        self._in_flight = in_flight

    def before_step(self, scheduler_output: SchedulerOutput) -> None:
        # may wait for a graph that is being warmed
        if self._static.follows_steps:
            self._static.begin_step()

    def without_tokens(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        if orders_warm_up(scheduler_output):
            attach_warm_up_state(output, self._static.warm_next())

    def before_divisions(self, step: ComputedStep, count: int) -> None:
        if count > 1:
            self._static.bypassed(f"step divided: {PARTIAL_LOAD if len(step.remainders) else TOO_MANY_BLOCKS}")

    def end_step(self) -> None:
        if self._static.follows_steps and not self._in_flight:
            self._static.end_step()

    def close(self) -> None:
        self._static.close()


class TrueShapeSteps(WorkerPart):
    """Answers orders to warm graphs if there are no graphs."""

    def without_tokens(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        if orders_warm_up(scheduler_output):
            attach_warm_up_state(output, WarmUpState(0))


class AheadSteps(WorkerPart):
    """Waits for the tokens of earlier steps before the next one is planned, with asynchronous scheduling."""

    def __init__(self, ahead: StepsAhead) -> None:
        self._ahead = ahead

    def before_step(self, scheduler_output: SchedulerOutput) -> None:
        self._ahead.begin_step(scheduler_output)


class SparseSteps(WorkerPart):
    """Makes a sparse method choose the blocks of a step. Must precede the parts that fill blocks."""

    def __init__(self, sparse: SparseWorker) -> None:
        self._sparse = sparse

    def requests_updated(self, scheduler_output: SchedulerOutput, clock: StepClock) -> None:
        self._sparse.update(scheduler_output)

    def before_plan(self, step: ComputedStep) -> None:
        self._sparse.decide(step.scheduler_output, step.drafts, step.requests, step.batch)
        step.set_apart(self._sparse.remainders(step.scheduler_output, step.requests, step.batch))

    def before_division(self, step: ComputedStep, division: Division) -> None:
        division.choose(self._sparse.step(step.scheduler_output, step.drafts, division.members, division.batch))

    def before_forward(self, division: Division) -> None:
        self._sparse.method.execute_begin(division.plan)

    def after_forward(self, division: Division) -> None:
        self._sparse.method.execute_finished()

    def report(self, step: ComputedStep) -> None:
        self._sparse.report()

    def before_output(self, step: ComputedStep, output: ModelRunnerOutput) -> None:
        self._sparse.finished(step.drafts, output)

    def close(self) -> None:
        self._sparse.close()


class MemorySteps(WorkerPart):
    """Moves, copies and swaps blocks as ordered by the scheduler.

    Args:
        sparse: the worker whose summaries become invalid for restored blocks; None without a sparse method.
    """

    def __init__(self, memory: MemoryWorker, sparse: SparseWorker | None) -> None:
        self._memory = memory
        self._sparse = sparse
        self._restored = NO_BLOCKS

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        self._restored = self._memory.begin_step(scheduler_output)

    def requests_updated(self, scheduler_output: SchedulerOutput, clock: StepClock) -> None:
        if self._sparse is not None and len(self._restored):
            self._sparse.loaded(self._restored, NO_BLOCKS)

    def step_computed(self, step: ComputedStep) -> None:
        step.figures.update(self._memory.take_work())

    def before_output(self, step: ComputedStep, output: ModelRunnerOutput) -> None:
        self._memory.attach_report(output)

    def close(self) -> None:
        self._memory.close()


class TransferSteps(WorkerPart):
    """Calls a KV connector in every step.

    Args:
        sparse: the worker whose summaries become invalid for loaded blocks; None without a sparse method.
        in_flight: the steps that the engine has not read yet.
    """

    def __init__(self, transfer: KvTransfer, sparse: SparseWorker | None, in_flight: Sized = ()) -> None:
        self._transfer = transfer
        self._sparse = sparse
        self._in_flight = in_flight

    def requests_updated(self, scheduler_output: SchedulerOutput, clock: StepClock) -> None:
        self._transfer.begin(scheduler_output)
        clock.skip(self._transfer.work.last_seconds)
        if self._sparse is not None:
            summarised = self._transfer.take_summarised_blocks()
            self._sparse.loaded(self._transfer.loaded_blocks(scheduler_output), summarised)

    def without_tokens(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        transferred = self._transfer.finish(rests=not self._in_flight)
        # None if there is no report
        output.kv_connector_output = ModelRunnerOutput.with_kv_conn_output_only(transferred).kv_connector_output

    def step_computed(self, step: ComputedStep) -> None:
        """Saves blocks after the drafts, which also read and write blocks, and before the next step begins."""
        self._transfer.computed()
        step.moved_blocks(self._transfer.finish())
        step.figures.update(self._transfer.take_work().figures())

    def before_output(self, step: ComputedStep, output: ModelRunnerOutput) -> None:
        output.kv_connector_output = step.transferred

    def close(self) -> None:
        self._transfer.close()


class LockstepSteps(WorkerPart):
    """Takes part in the steps of engines that share out experts with this one.

    Args:
        follow: takes part in a forward of theirs.
    """

    def __init__(self, lockstep: Lockstep, follow: Callable[[], None]) -> None:
        self._lockstep = lockstep
        self._follow = follow

    def before_divisions(self, step: ComputedStep, count: int) -> None:
        self._lockstep.begin(count)

    def after_divisions(self) -> None:
        self._lockstep.finish(self._follow)

    def dummy_step(self) -> None:
        self._lockstep.begin(0)
        self._follow()
        self._lockstep.finish(self._follow)


class StepRecords(WorkerPart):
    """Writes a record of each step to the phase log and the metrics. Must follow the parts that add figures.

    Args:
        host: counts the waits of steps, and their work on the host.
    """

    def __init__(self, phase_log: PhaseLog, metrics: StepMetrics, host: HostWork, block_size: int) -> None:
        self.phase_log = phase_log
        self._metrics = metrics
        self._host = host
        self._block_size = block_size

    def step_computed(self, step: ComputedStep) -> None:
        host = self._host.take_counts()
        step.figures.update(host_reads=host.reads, host_stages=host.stages)

    def report(self, step: ComputedStep) -> None:
        """Writes a record for each division with its shape; sampling and moved blocks belong to the last one."""
        for division in step.divisions:
            number, shape = self.phase_log.summary.steps, division.shape
            record = step_record(division.clock, number, division.plan, shape, self._block_size)
            if division is step.divisions[-1]:
                record = replace(record, **step.figures)
            self.phase_log.append(record)
            self._metrics.step(record.bucket, record.padded, shape.remainder)
            if shape.chosen:
                self._metrics.chosen_tokens(int((division.plan.positions >= shape.chosen).sum()))
            self._metrics.times(record.plan_ms, record.forward_ms, record.sample_ms)


def step_record(clock: StepClock, step: int, plan: UnifiedPlan, shape: StepShape, block_size: int) -> StepRecord:
    """Returns the record of a step. block_size: tokens per block; selected blocks are full."""
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
        prompt_remainder=int(shape.remainder),
        time=time.time(),
    )
