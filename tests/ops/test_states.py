"""Operations that keep a state for each request, by the references, against each request alone in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.states import (
    NULL,
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
from vllm_gaudi_ucm.ops.gated_delta.api import gated_delta
from vllm_gaudi_ucm.ops.gated_delta.implementation import DeltaRows
from vllm_gaudi_ucm.ops.state_rows import plan_state_rows
from vllm_gaudi_ucm.ops.state_space.api import state_space
from vllm_gaudi_ucm.ops.state_space.implementation import SpaceRows

# decodes, a verification whose states are kept row by row, a prompt that begins, one that continues and keeps the
# state after a block, and after its last row in two slots
STEP = (
    Request(1, 5, {0: 5}),
    Request(3, 6, {0: 6, 1: 7, 2: 8}),
    Request(9, ZEROS, {8: 9}),
    Request(11, 10, {3: 11, 10: 10}),
    Request(1, 13, {0: 13}),
)
COUNT, SLOTS = sum(each.rows for each in STEP), 14


def drawn_states(*shape: int, random: torch.Generator) -> Tensor:
    """States of all slots; garbage in the null slot, which nothing may read."""
    states = torch.randn(SLOTS, *shape, generator=random, dtype=torch.float64)
    states[ZEROS], states[NULL] = 0, float("nan")
    return states


def assert_same(found: Tensor, states: Tensor, wanted: tuple[Tensor, Tensor], error: float = 1e-12) -> None:
    """Float64 against float64: only the order of sums differs."""
    torch.testing.assert_close(found, wanted[0], rtol=error, atol=error)
    torch.testing.assert_close(states[1:], wanted[1][1:], rtol=error, atol=error)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_convolution(taps: int, silu: bool) -> None:
    random = torch.Generator().manual_seed(taps)
    x = torch.randn(COUNT, 6, generator=random, dtype=torch.float64)
    weight = torch.randn(6, taps, generator=random, dtype=torch.float64)
    bias = weight[:, 0] if silu else None
    states = drawn_states(taps - 1, 6, random=random)
    wanted = by_definition(STEP, states, [x], convolution(weight, bias, silu))
    found = causal_conv1d(x, weight, bias, states, plan(STEP, few=3, width=4), silu=silu)
    assert_same(found, states, wanted)


@pytest.mark.parametrize("implementation", ["reference"])
@pytest.mark.parametrize("skip", [False, True])
def test_state_space(implementation: str, skip: bool) -> None:
    random = torch.Generator().manual_seed(1)
    rows = SpaceRows(*double(space_rows(COUNT, 4, 3, 2, 5, random)))
    a = torch.tensor([-1.0, -0.5, -3.0, -1.0], dtype=torch.float64)
    d = a + 2 if skip else None
    states = drawn_states(4, 3, 5, random=random)
    wanted = by_definition(STEP, states, rows, space(a, d))
    found = state_space(rows, a, d, states, plan(STEP, few=3, width=4), implementation=implementation)
    assert_same(found, states, wanted)


@pytest.mark.parametrize("implementation", ["reference"])
@pytest.mark.parametrize("normalise", [False, True])
def test_gated_delta(implementation: str, normalise: bool) -> None:
    random = torch.Generator().manual_seed(2)
    rows = DeltaRows(*double(delta_rows(COUNT, 4, 2, 5, 3, random)))
    if not normalise:
        rows = rows._replace(k=rows.k / 10)
    states = drawn_states(4, 5, 3, random=random)
    wanted = by_definition(STEP, states, rows, delta(normalise))
    found = gated_delta(rows, states, plan(STEP, few=3, width=4), normalise=normalise, implementation=implementation)
    assert_same(found, states, wanted)


def test_a_row_is_kept_in_two_slots() -> None:
    """After a block and for the request itself; not in a request with few rows."""
    request = Request(6, ZEROS, {5: 4})
    starts, sources = np.array([0, 6]), np.array([ZEROS])
    arrays = plan_state_rows(starts, sources, np.array([5, 3, 5]), np.array([4, 2, 3]), null=NULL, width=4)
    assert arrays["tile_targets"].tolist() == [2, 4, 3]
    assert arrays["tile_rows"].tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [-1, -1, -1, -1]]
    assert arrays["tile_sources"].tolist() == [ZEROS, -1, -1]
    assert plan([request], width=4).tile_targets.tolist() == [NULL, 4]
    with pytest.raises(ValueError, match="at most 6 rows kept in two slots, expected one"):
        plan_state_rows(starts, sources, np.array([5, 5]), np.array([4, 2]), null=NULL, few=6)


def test_shapes_are_checked() -> None:
    random = torch.Generator().manual_seed(3)
    step = plan([Request(2)])
    with pytest.raises(ValueError, match=r"causal_conv1d: states is \(3, 2, 6\), expected \(3, 3, 6\)"):
        causal_conv1d(torch.zeros(2, 6), torch.zeros(6, 4), None, torch.zeros(3, 2, 6), step)
    rows = space_rows(2, 4, 3, 2, 5, random)
    with pytest.raises(ValueError, match=r"state_space: b is \(2, 2, 5\), expected \(2, 2, 6\)"):
        state_space(rows, torch.zeros(4), None, torch.zeros(3, 4, 3, 6), step)
    others = delta_rows(3, 4, 2, 5, 3, random)
    with pytest.raises(ValueError, match=r"gated_delta: q is \(3, 2, 5\), expected \(2, 2, 5\)"):
        gated_delta(others, torch.zeros(3, 4, 5, 3), step)
