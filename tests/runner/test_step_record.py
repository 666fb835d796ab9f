"""What a step leaves behind: the attention work that its plan says."""

from __future__ import annotations

from hypothesis import given

from tests.batch.batches import Step, steps
from tests.batch.expand import causal_pairs, shared_pairs, unique_pairs
from vllm_gaudi_ucm.batch.batch_plan import plan_batch
from vllm_gaudi_ucm.execution.execution import StepShape
from vllm_gaudi_ucm.execution.step_tensors import true_shape
from vllm_gaudi_ucm.observability.step_clock import StepClock
from vllm_gaudi_ucm.runner.parts import step_record


@given(steps())
def test_pairs_are_those_of_the_plan(step: Step) -> None:
    """covers: A13. Every (row, token) product of each part, counted one by one."""
    plan = plan_batch(step.batch_input(), step.block_size)
    clock = StepClock()
    clock.planned()
    clock.computed()
    clock.sampled()
    shape = true_shape(plan, 0 if plan.unique is None else len(plan.unique.rows))
    record = step_record(clock, 0, plan, StepShape(shape, shape), step.block_size)
    assert record.causal_pairs == len(list(causal_pairs(plan)))
    assert record.shared_pairs == len(list(shared_pairs(plan, step)))
    assert record.unique_pairs == len(list(unique_pairs(plan, step)))
