"""Kernels of layers with states, against each request alone in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.ops.oracle import CUDA_RUNS
from tests.ops.states import (
    NULL,
    STEP,
    ZEROS,
    Request,
    by_definition,
    convolution,
    delta,
    delta_rows,
    double,
    plan,
    space,
    space_rows,
)
from vllm_gaudi_ucm.ops.causal_conv1d.api import causal_conv1d
from vllm_gaudi_ucm.ops.gated_delta.api import delta_gates, gated_delta
from vllm_gaudi_ucm.ops.gated_delta.implementation import DeltaRows
from vllm_gaudi_ucm.ops.gated_norm.api import gated_norm
from vllm_gaudi_ucm.ops.state_rows import StateRows
from vllm_gaudi_ucm.ops.state_space.api import state_space, time_steps
from vllm_gaudi_ucm.ops.state_space.implementation import SpaceRows

pytestmark = pytest.mark.skipif(not CUDA_RUNS, reason="needs a GPU or Triton's interpreter")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT, SLOTS = sum(each.rows for each in STEP), 14
DECODES = tuple(Request(1, slot, {0: slot}) for slot in (4, 7, ZEROS + 1))
# tiles of their full width, which continue from each other, from a kept state, and next to a decode
LONG = (Request(1, 5, {0: 5}), Request(130, ZEROS, {129: 9}), Request(70, 10, {3: 11, 69: 10}))
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


def on_device(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.to(DEVICE) for each in tensors]


def rows_of(requests: Sequence[Request]) -> StateRows:
    """Tiles of production for long prompts, and small ones otherwise."""
    return StateRows(*on_device(plan(requests, few=3, width=64 if requests is LONG else 4)))


def drawn(*shape: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    states = torch.randn(SLOTS, *shape, generator=random).to(dtype)
    states[ZEROS], states[NULL] = 0, float("nan")
    return states


def wide(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows in another dtype, with gaps between them, as they are in the results of a projection."""
    flat = rows.flatten(1).to(dtype)
    return torch.cat((flat, torch.full_like(flat, torch.nan)), 1)[:, : flat.shape[1]].unflatten(1, rows.shape[1:])


def assert_near(found: Tensor, exact: Tensor, dtype: torch.dtype, state: torch.dtype) -> None:
    """Numbers in between are float32, and results and states are rounded to their dtypes once; a state row by row, so
    that a later row reads a rounded one: 4 units in the last place of the largest number allow for it. Triton's
    interpreter cuts bfloat16 off, which is twice the error. Rows of float32 are not rounded once, but sums of up to
    200 products: 8 units.
    """
    eps = max(torch.finfo(dtype).eps, torch.finfo(state).eps)
    units = 8 if dtype == torch.float32 else 4
    assert float((found.cpu().double() - exact).abs().max()) <= units * eps * float(exact.abs().max().clamp(min=1))


@pytest.mark.parametrize("requests", [STEP, DECODES, LONG], ids=["mixed", "decodes", "long"])
@pytest.mark.parametrize(("dtype", "state"), DTYPES, ids=str)
def test_convolution_cuda(dtype: torch.dtype, state: torch.dtype, requests: Sequence[Request]) -> None:
    random = torch.Generator().manual_seed(1)
    count = sum(each.rows for each in requests)
    for taps, silu in ((2, False), (4, True)):
        x = wide(torch.randn(count, 40, generator=random), dtype)
        weight = torch.randn(40, taps, generator=random).to(dtype)
        bias = weight[:, 0].contiguous() if silu else None
        states = drawn(taps - 1, 40, dtype=state, random=random)
        exact, after = by_definition(requests, states.double(), double([x]), convolution(*double([weight, bias]), silu))
        states = states.to(DEVICE)
        bias = None if bias is None else bias.to(DEVICE)
        step, moved = rows_of(requests), wide(x, dtype).to(DEVICE)
        found = causal_conv1d(moved, weight.to(DEVICE), bias, states, step, silu=silu, implementation="cuda")
        assert_near(found, exact, dtype, dtype)
        assert_near(states[1:], after[1:], dtype, state)


@pytest.mark.parametrize("requests", [STEP, DECODES, LONG], ids=["mixed", "decodes", "long"])
@pytest.mark.parametrize(("dtype", "state"), DTYPES, ids=str)
def test_state_space_cuda(dtype: torch.dtype, state: torch.dtype, requests: Sequence[Request]) -> None:
    """Dimensions that are no power of two, and a state of more than one program."""
    random = torch.Generator().manual_seed(2)
    count = sum(each.rows for each in requests)
    for heads, dim, groups, size, skip in ((4, 3, 2, 5, False), (2, 40, 1, 200, True)):
        x, dt, b, c = space_rows(count, heads, dim, groups, size, random)
        rows = SpaceRows(wide(x, dtype), dt.clamp(max=1), wide(b, dtype), wide(c, dtype))
        a = -torch.rand(heads, generator=random)
        d = a + 2 if skip else None
        states = drawn(heads, dim, size, dtype=state, random=random)
        exact, after = by_definition(requests, states.double(), double(rows), space(*double([a, d])))
        states = states.to(DEVICE)
        d = None if d is None else d.to(DEVICE)
        step, moved = rows_of(requests), SpaceRows(*on_device(rows))
        found = state_space(moved, a.to(DEVICE), d, states, step, implementation="cuda")
        assert_near(found, exact, dtype, state)
        assert_near(states[1:], after[1:], dtype, state)


@pytest.mark.parametrize("requests", [STEP, DECODES, LONG], ids=["mixed", "decodes", "long"])
@pytest.mark.parametrize(("dtype", "state"), DTYPES, ids=str)
def test_gated_delta_cuda(dtype: torch.dtype, state: torch.dtype, requests: Sequence[Request]) -> None:
    """Dimensions that are no power of two, and a state of more than one program."""
    random = torch.Generator().manual_seed(3)
    count = sum(each.rows for each in requests)
    for heads, key_heads, key_dim, value_dim, normalise in (
        (4, 2, 5, 3, True),
        (2, 2, 200, 40, True),
        (2, 1, 5, 3, False),
        (1, 1, 40, 72, True),
        (2, 1, 64, 128, True),
    ):
        q, k, v, log_decay, beta = delta_rows(count, heads, key_heads, key_dim, value_dim, random)
        k = k if normalise else k / 10
        rows = DeltaRows(wide(q, dtype), wide(k, dtype), wide(v, dtype), log_decay, beta)
        states = drawn(heads, key_dim, value_dim, dtype=state, random=random)
        exact, after = by_definition(requests, states.double(), double(rows), delta(normalise))
        states = states.to(DEVICE)
        step, moved = rows_of(requests), DeltaRows(*on_device(rows))
        found = gated_delta(moved, states, step, normalise=normalise, implementation="cuda")
        assert_near(found, exact, dtype, state)
        assert_near(states[1:], after[1:], dtype, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_cuda(dtype: torch.dtype) -> None:
    """Parts with gaps between them, and steps from almost 0 to beyond where softplus is the number itself."""
    random = torch.Generator().manual_seed(4)
    joined = (torch.randn(5, 3, 8, generator=random) * 20).to(dtype).to(DEVICE)
    a, b = joined.split([4, 4], -1)
    a_log, bias = torch.randn(2, 12, generator=random).to(DEVICE)
    for found, exact in zip(
        (
            *delta_gates(a, b, a_log, bias, implementation="cuda"),
            time_steps(joined[:, 0], bias[:8], implementation="cuda"),
        ),
        (
            *delta_gates(*double([a, b, a_log, bias]), implementation="reference"),
            time_steps(*double([joined[:, 0], bias[:8]]), implementation="reference"),
        ),
        strict=True,
    ):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_norm_cuda(dtype: torch.dtype, gate_first: bool) -> None:
    """Several groups in a program, and one group; a gate with gaps between parts that are no groups."""
    random = torch.Generator().manual_seed(5)
    for groups, size, each in ((4, 6, False), (2, 12, True), (1, 24, True)):
        x = torch.randn(7, groups, size, generator=random).to(dtype).to(DEVICE)
        gate = torch.randn(7, 3, 20, generator=random).to(dtype).to(DEVICE)[..., 2:10]
        weight = torch.randn(groups * size, generator=random).view(groups, size).to(DEVICE)
        weight = weight if each else weight[0]
        found = gated_norm(x, gate, weight, 1e-6, gate_first=gate_first, implementation="cuda")
        exact = gated_norm(*double([x, gate, weight]), 1e-6, gate_first=gate_first, implementation="reference")
        assert_near(found, exact.cpu(), dtype, dtype)
