"""A step in a bucket: what its real rows get, what its pads point at, and that nothing of an earlier step is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batch.batches import Request, lay_out, steps
from tests.batch.expand import owners
from tests.batch.token_steps import TokenStep, token_steps
from tests.execution.bucket_tensors import CPU, Static, in_bucket, server_limits, step_shape
from tests.execution.true_shape_tensors import WINDOWS
from tests.ops.oracle import CUDA_RUNS, assert_matches, attend, examples
from vllm_gaudi_ucm.batch.batch_plan import plan_batch
from vllm_gaudi_ucm.execution.graph_manager import BucketTensors, LogitsRows
from vllm_gaudi_ucm.execution.step_tensors import StepInputs
from vllm_gaudi_ucm.graphs.shapes import prompt_tiles
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION

# As an index it is far outside of everything.
POISON = 1 << 40


SOME_STEPS = st.one_of(steps(), token_steps()).filter(lambda step: len(step.requests) > 0)


@st.composite
def static_steps(draw: st.DrawFn) -> Static:
    """Of blocks or of slots. Buckets from exact to the maximum, with parts that the step lacks."""
    step = draw(SOME_STEPS)
    contiguous = draw(st.booleans()) and not isinstance(step, TokenStep)
    slack = st.sampled_from([0, 0, 1, 7, 60])
    window = None if isinstance(step, TokenStep) else draw(WINDOWS)
    limits = server_limits(step, contiguous, draw(slack), draw(slack), draw(slack), window)
    plan = plan_batch(step.batch_input(), step.block_size, window=window)
    true, most = step_shape(plan, contiguous), limits.maximum
    q, s, u, logits = (
        draw(st.one_of(st.just(low), st.just(high), st.integers(low, high)))
        for low, high in zip(true[1:5], most[1:5], strict=True)
    )
    causal = true.phase[0] == "c" or draw(st.booleans())
    least = 1 if plan.causal is None else true.max_prompt_tiles
    reach = draw(st.one_of(st.just(least), st.integers(least, least + 3), st.just(ALL_TILES)))
    shape = ForwardShape.from_sizes(causal, q, s, u, 0, reach)
    return Static(step, plan, shape.step(logits), limits, draw(st.sampled_from([1, 5, 512])), window)


def attends(static: Static, split: StepInputs, implementation: str) -> None:
    batch = in_bucket(static, split)
    if ATTENTION.make(implementation).supports(batch.spec):
        assert_matches(batch, implementation, prepared=True)


def _static(requests: list[Request], more: int = 0, contiguous: bool = False, seed: int = 0) -> Static:
    """The step in the server's largest bucket."""
    step = lay_out(requests, 4, seed)
    limits = server_limits(step, contiguous, more, more, more)
    return Static(step, plan_batch(step.batch_input(), 4), limits.maximum, limits, 8)


def poison_host(inputs: BucketTensors, value: int) -> None:
    """Steps are written over this."""
    for buffer in inputs._steps.all:
        buffer.tensor.fill_(value)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few rows, so that small steps have many."""
    monkeypatch.setattr(prompt_tiles, "TILE_ROWS", 3)


@settings(max_examples=60)
@given(static=static_steps())
def test_the_hpu_implementation_takes_the_tensors_of_a_bucket(static: Static) -> None:
    """covers: A2 A9 A10 A11 A15 B4. Also where the bucket bounds how far rows look back."""
    inputs = static.inputs()
    static.fill(inputs).fill_(POISON)
    poison_host(inputs, POISON)
    split = inputs.split(static.fill(inputs), static.bucket.forward)
    attends(static, split, "hpu")


@settings(max_examples=60)
@given(static=static_steps())
def test_every_real_row_gets_attention_over_its_own_past_and_pads_get_zeros(static: Static) -> None:
    """covers: A9 A10 A11 A19 B4. Host buffer and device tensor hold garbage before the step."""
    inputs = static.inputs()
    static.fill(inputs).fill_(POISON)
    poison_host(inputs, POISON)
    split = inputs.split(static.fill(inputs), static.bucket.forward)
    attends(static, split, "reference")


@pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")
@settings(max_examples=examples(40))
@given(static=static_steps())
def test_cuda_takes_the_tensors_of_a_bucket(static: Static) -> None:
    """covers: A9 A10 A11 B4"""
    inputs = static.inputs()
    attends(static, inputs.split(static.fill(inputs), static.bucket.forward), "cuda")


@settings(max_examples=50)
@given(static=static_steps())
def test_tokens_and_slots_come_first_and_pads_are_the_dummy_block(static: Static) -> None:
    """covers: A9 A10"""
    inputs = static.inputs()
    poison_host(inputs, POISON)
    split = inputs.split(static.fill(inputs), static.bucket.forward)
    rows, size = owners(static.plan, static.step), static.step.block_size
    places = [static.step.place(*row) for row in rows]
    pads = [0] * (static.bucket.query_len - len(rows))
    assert split.token_ids.tolist() == [*range(1000, 1000 + len(rows)), *pads]
    assert split.positions.tolist() == [position for _, position in rows] + pads
    assert split.slots.tolist() == [block * size + offset for block, offset in places] + pads


@settings(max_examples=50)
@given(static=static_steps())
def test_every_index_is_within_what_it_indexes(static: Static) -> None:
    """covers: A10"""
    inputs = static.inputs()
    poison_host(inputs, -POISON)
    split = inputs.split(static.fill(inputs), static.bucket.forward)
    for indices, end in _indices(split, static):
        assert indices.dtype == torch.int64
        assert ((indices >= 0) & (indices < end)).all()


def _indices(split: StepInputs, static: Static) -> Iterator[tuple[torch.Tensor, int]]:
    """(indices, how many entries there are to index)."""
    limits = static.limits
    if split.parts.causal is not None and split.parts.causal.tiles is not None:
        yield split.parts.causal.tiles.first, static.bucket.query_len
        yield split.parts.causal.tiles.last, static.bucket.query_len
    yield split.positions, limits.max_model_len
    yield split.slots, limits.num_blocks * limits.block_size
    shared, unique = split.parts.shared, split.parts.unique
    if shared is not None:
        yield shared.blocks, limits.num_blocks
        yield shared.row_spans, shared.hi.shape[0]
        yield shared.groups[0].rows, static.bucket.query_len
    if unique is not None:
        yield unique.rows, unique.num_rows
        if unique.blocks is not None:
            yield unique.blocks, limits.num_blocks


@settings(max_examples=60)
@given(static=static_steps())
def test_a_step_leaves_the_same_bits_whatever_ran_before(static: Static) -> None:
    """covers: A9. Before it the same server ran a step that filled its largest bucket."""
    fresh = static.fill(static.inputs()).clone()
    inputs = static.inputs()
    for shape in (static.limits.maximum.forward, static.bucket.forward):
        inputs.fill_pads(shape).fill_(POISON)
        poison_host(inputs, POISON)
    assert torch.equal(static.fill(inputs), fresh)


def test_a_small_step_after_a_large_one_shows_nothing_of_it() -> None:
    """Both in one bucket, through the same tensors. covers: A9"""
    large = _static([Request(9, 1, prefix=2), Request(12, 1, prefix=3), Request(8, 7, prefix=2), Request(5, 1)])
    small = replace(large.step, requests=large.step.requests[3:], tables=large.step.tables[3:])
    after = large._replace(step=small, plan=plan_batch(small.batch_input(), 4))
    inputs = large.inputs()
    first = large.fill(inputs)
    before = first.clone()
    split = inputs.split(after.fill(inputs), large.bucket.forward)
    assert_matches(in_bucket(after, split), "reference")
    assert split.parts.shared is not None
    assert split.parts.causal is not None
    assert not split.parts.shared.hi.any()
    assert (split.parts.causal.groups == -1).all()
    assert torch.equal(large.fill(inputs), before)


@settings(max_examples=50)
@given(static=static_steps())
def test_tensors_and_loops_are_functions_of_the_bucket_alone(static: Static) -> None:
    """A graph reads fixed memory at fixed shapes, and what the host counts out is a part of it. covers: B5"""
    inputs = static.inputs()
    flat = static.fill(inputs)
    parts = _form(inputs.split(flat, static.bucket.forward))
    other = static.bucket._replace(logits=static.limits.max_num_seqs).forward
    nothing = inputs.fill_pads(other)
    assert nothing.data_ptr() == flat.data_ptr()
    assert _form(inputs.split(nothing, other)) == parts
    assert _form(static.inputs().split(torch.randint(0, 9, flat.shape), static.bucket.forward)) == parts


def _form(split: StepInputs) -> list[object]:
    """Every tensor as its shape and strides, everything else by value."""
    pending: list[object] = [*split]
    found: list[object] = []
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            found.append((item.dtype, item.shape, item.stride()))
        elif isinstance(item, tuple):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
        else:
            found.append(item)
    return found


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_step_in_a_bucket_a_hundred_times_as_large(contiguous: bool) -> None:
    static = _static([Request(9, 1, prefix=2), Request(8, 5, prefix=2), Request(2, 1)], 400, contiguous)
    inputs = static.inputs()
    split = inputs.split(static.fill(inputs), static.bucket.forward)
    assert static.bucket.query_len > 50 * static.plan.num_rows
    assert_matches(in_bucket(static, split), "reference")


@pytest.mark.parametrize("phase", ["csu", "cs-", "c-u", "-su", "c--", "-s-", "--u", "---"])
def test_pads_alone_touch_the_dummy_block_only_and_give_zeros(phase: str) -> None:
    """What warm-up executes, after a step whose values are still in the host buffer. covers: A9 B4"""
    static = _static([Request(9, 1, prefix=2), Request(8, 5, prefix=2), Request(2, 1)])
    inputs = static.inputs()
    static.fill(inputs)
    shape = ForwardShape.from_sizes("c" in phase, 6, 5 * ("s" in phase), 7 * ("u" in phase))
    split = inputs.split(inputs.fill_pads(shape), shape)
    assert not split.slots.any()
    pads = _static([])._replace(bucket=shape.step(0), limits=static.limits)
    plain = replace(in_bucket(pads, split), seen=[None] * 6)
    assert not attend(plain, "reference").any()


def test_rows_of_logits_are_followed_by_row_0() -> None:
    """covers: A9 A10"""
    inputs = LogitsRows(5, CPU)
    assert inputs.fill(5, np.array([9, 8, 7, 6, 5])).tolist() == [9, 8, 7, 6, 5]
    rows = inputs.fill(5, np.array([3, 1]))
    assert rows.tolist() == [3, 1, 0, 0, 0]
    assert inputs.fill(2, np.array([4, 2])).tolist() == [4, 2]
    assert rows.tolist() == [3, 1, 0, 0, 0]


def test_tensors_of_another_phase_than_the_bucket_says_are_an_error() -> None:
    """covers: B4"""
    inputs = _static([Request(0, 1)] * 3).inputs()
    wrong = ForwardShape("--u", 2, 1, 1)
    with pytest.raises(ValueError, match="its tensors make the phase '-su'"):
        inputs.split(inputs.fill_pads(wrong), wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a device copies while the host goes on")
def test_a_step_is_copied_whole_although_the_next_one_is_written_at_once() -> None:
    """Both copies wait for a graph that still runs, as after a prompt chunk that yields no token. covers: A9"""
    static = _static([Request(0, 9), Request(3, 8), Request(4, 1)])
    expected, rows = static.fill(static.inputs()), np.arange(static.limits.max_num_seqs)
    inputs = BucketTensors(static.limits, static.causal_slice, torch.device("cuda"), pin_memory=True)
    logits_rows = LogitsRows(static.limits.max_num_seqs, torch.device("cuda"), pin_memory=True)
    static.fill(inputs)
    logits_rows.fill(static.limits.max_num_seqs, rows)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    flat = static.fill(inputs)
    chosen = logits_rows.fill(static.limits.max_num_seqs, rows)
    inputs.fill_pads(static.limits.phase_maximum(causal=False, shared=False, unique=True))
    assert torch.equal(flat.cpu(), expected)
    assert chosen.tolist() == rows.tolist()


@pytest.mark.parametrize("by_token", [False, True])
def test_only_slots_for_tokens_have_a_lower_bound(by_token: bool) -> None:
    """Graphs of blocks get no tensor, and so no operator, more."""
    static = _static([Request(9, 1, prefix=2), Request(8, 5, prefix=2), Request(2, 1)])
    limits = replace(static.limits, strip=2 * by_token)
    inputs, shape = BucketTensors(limits, static.causal_slice, CPU), limits.maximum.forward
    assert {"shared_from", "unique_lo"} & set(inputs._layout(shape, inputs._steps.all[0]).names) == (
        {"shared_from", "unique_lo"} if by_token else set()
    )
    parts = inputs.split(inputs.fill_pads(shape), shape).parts
    assert parts.shared is not None
    assert parts.unique is not None
    assert parts.shared.from_first == parts.unique.from_first == (not by_token)
