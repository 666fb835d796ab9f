"""Plan, staging and operation together against float64 attention: what a step's rows really get."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batch.batches import Request, Step, lay_out, steps
from tests.batch.expand import shared_pairs, unique_pairs
from tests.batch.token_steps import TokenStep, token_steps
from tests.execution.true_shape_tensors import CPU, WINDOWS, run_step
from tests.ops.oracle import IMPLEMENTATIONS, assert_matches
from vllm_gaudi_ucm.batch.batch_plan import plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.batch.sharing import UniquePlan
from vllm_gaudi_ucm.batch.window import Window
from vllm_gaudi_ucm.execution.step_tensors import StepInputs
from vllm_gaudi_ucm.execution.true_shape_tensors import SLICE_READ_LIMIT, ContiguousPa, TrueShapeTensors
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES, is_bounded
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION

CHOICES: list[ContiguousPa] = [True, False, "auto"]


@settings(max_examples=150)
@given(step=steps(), contiguous_pa=st.sampled_from(CHOICES), causal_slice=st.sampled_from([1, 5, 512]), window=WINDOWS)
def test_every_row_gets_attention_over_its_own_past(
    step: Step, contiguous_pa: ContiguousPa, causal_slice: int, window: Window | None
) -> None:
    """Or over what a window leaves of it. covers: A1 A2 A3 A5 A9 A10 A19"""
    batch = run_step(step, contiguous_pa, causal_slice, window=window)
    computed = [name for name in IMPLEMENTATIONS if ATTENTION.make(name).supports(batch.spec)]
    assert_matches(batch, *computed, prepared=True)


@settings(max_examples=100)
@given(step=token_steps(), causal_slice=st.sampled_from([5, 512]))
def test_every_row_gets_attention_over_its_own_slots(step: TokenStep, causal_slice: int) -> None:
    """Whatever else is in their tiles: the slots of other requests, and NaN. covers: A1 A2 A3 A5 A9"""
    batch = run_step(step, False, causal_slice)
    assert_matches(batch, *IMPLEMENTATIONS, prepared=True)
    unique = batch.parts.unique
    # by which kernels of CUDA see whether to read slots or blocks
    assert unique is None or unique.num_tokens == int((unique.hi - unique.lo).sum())


@given(step=steps(), contiguous_pa=st.sampled_from(CHOICES))
def test_the_bucket_is_the_true_shape(step: Step, contiguous_pa: ContiguousPa) -> None:
    plan = plan_batch(step.batch_input(), step.block_size)
    staged, shape = TrueShapeTensors(CPU, contiguous_pa).stage(PlannedStep.of_tokens(plan, np.arange(plan.num_rows)))
    causal = any(request.new > 1 for request in step.requests)
    shared = {step.place(request, position)[0] for _, request, position in shared_pairs(plan, step)}
    unique = {step.place(request, position)[0] for _, request, position in unique_pairs(plan, step)}
    phase = ("c" if causal else "-") + ("s" if shared else "-") + ("u" if unique else "-")
    gathers = staged.parts.unique is not None and staged.parts.unique.blocks is not None
    unique_blocks = len(unique) if gathers or not unique else max(unique) + 1
    logits = sum(request.behind == 0 for request in step.requests)
    rows = sum(request.new for request in step.requests)
    reach = shape.max_prompt_tiles
    assert reach == ALL_TILES or (causal and is_bounded(rows, reach)), "steps of one tile have no bound"
    assert shape == Bucket(phase, rows, len(shared), unique_blocks, logits, 0, reach)


@given(step=steps(), contiguous_pa=st.sampled_from(CHOICES))
def test_indices_are_never_negative_and_have_the_declared_types(step: Step, contiguous_pa: ContiguousPa) -> None:
    """covers: A10"""
    plan = plan_batch(step.batch_input(), step.block_size)
    staged = TrueShapeTensors(CPU, contiguous_pa).stage(PlannedStep.of_tokens(plan, np.arange(plan.num_rows)))[0]
    for tensor in _indices(staged):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
        assert (tensor >= 0).all()
    for part in (staged.parts.shared, staged.parts.unique):
        if part is not None:
            assert part.lo.dtype == part.hi.dtype == torch.int32
    assert staged.parts.causal is None or staged.parts.causal.groups.dtype == torch.int32


def _indices(staged: StepInputs) -> list[torch.Tensor]:
    found = [staged.token_ids, staged.positions, staged.slots]
    if staged.parts.shared is not None:
        found += [staged.parts.shared.blocks, staged.parts.shared.row_spans]
        found += [group.rows for group in staged.parts.shared.groups]
    if staged.parts.unique is not None:
        found.append(staged.parts.unique.rows)
        if staged.parts.unique.blocks is not None:
            found.append(staged.parts.unique.blocks)
    return found


@pytest.mark.parametrize(
    ("contiguous_pa", "top_block", "reads_slice"),
    [
        ("auto", int(3 * SLICE_READ_LIMIT) - 1, True),
        ("auto", int(3 * SLICE_READ_LIMIT), False),
        (True, 1000, True),
        (False, 3, False),
    ],
)
def test_the_slice_is_read_while_it_costs_less_than_gathering(
    contiguous_pa: ContiguousPa, top_block: int, reads_slice: bool
) -> None:
    """Three blocks in use, the highest decides the slice. covers: A20"""
    step = Step([Request(2, 1) for _ in range(3)], [[1], [2], [top_block]], 4, top_block + 1)
    plan = plan_batch(step.batch_input(), 4)
    unique = TrueShapeTensors(CPU, contiguous_pa).stage(PlannedStep.of_tokens(plan, np.arange(3)))[0].parts.unique
    assert unique is not None
    assert (unique.blocks is None) == reads_slice
    assert len(unique.rows) == (top_block + 1 if reads_slice else 3)


def test_blocks_of_the_slice_that_nobody_uses_have_an_empty_range() -> None:
    """Shared blocks and blocks of others lie inside the slice; none of their tokens is read. covers: A19"""
    requests = [Request(8, 1, prefix=1), Request(8, 1, prefix=1), Request(7, 5)]
    step = Step(requests, [[6, 2, 9], [6, 4, 8], [3, 1, 5]], 4, 10)
    plan = plan_batch(step.batch_input(), 4)
    unique = TrueShapeTensors(CPU, True).stage(PlannedStep.of_tokens(plan, np.arange(plan.num_rows)))[0].parts.unique
    assert unique is not None
    assert unique.hi.tolist() == [0, 0, 4, 0, 4, 0, 0, 0, 1, 1]
    assert not unique.lo.any()
    for implementation in IMPLEMENTATIONS:
        assert_matches(run_step(step, True, 512), implementation, prepared=True)


def test_an_empty_plan_stages() -> None:
    step = lay_out([], 16, 0)
    _, shape = TrueShapeTensors(CPU).stage(PlannedStep.of_tokens(plan_batch(step.batch_input(), 16), np.arange(0)))
    assert shape == Bucket("---", 0, 0, 0, 0)


def test_staging_keeps_nothing_of_the_step_before() -> None:
    """The same staging serves a large step, then a small one. covers: A9"""
    staging = TrueShapeTensors(CPU, True)
    large, small = lay_out([Request(20, 1)] * 6, 4, 1), Step([Request(1, 1)], [[9]], 4, 10)
    plans = [plan_batch(step.batch_input(), 4) for step in (large, small, large)]
    first, second, third = (staging.stage(PlannedStep.of_tokens(plan, np.arange(plan.num_rows)))[0] for plan in plans)
    assert second.parts.unique is not None
    assert second.parts.unique.hi.tolist() == [0] * 9 + [2]
    assert first.parts.unique is not None
    assert third.parts.unique is not None
    assert isinstance(plans[1].unique, UniquePlan)
    assert all(
        torch.equal(one, other)
        for one, other in zip(first.parts.unique[1:4], third.parts.unique[1:4], strict=True)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    )
