"""Operations that keep a state for each request: every implementation against each request alone in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

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
from vllm_gaudi_ucm.ops.gated_delta.api import gated_delta
from vllm_gaudi_ucm.ops.gated_delta.implementation import DeltaRows
from vllm_gaudi_ucm.ops.state_rows import StateRows, plan_state_rows
from vllm_gaudi_ucm.ops.state_space.api import state_space
from vllm_gaudi_ucm.ops.state_space.implementation import SpaceRows
from vllm_gaudi_ucm.ops.state_tiles import inverse_of_unit_lower

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


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
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


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
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


def budget(plain: Tensor, exact: Tensor) -> float:
    """2 x (error of row-by-row arithmetic in float32 + a band), of results or states.

    The band: both sum the same products in other orders, and each order is off by a few units in the last place of the
    largest number. A weight of a tile is exp(-L), where L is summed from up to 64 terms and is off by at most 64 units
    of its last place, so that the weight is off by 64 * L * exp(-L) * eps, at most 24 eps; errors of one weight are
    averaged over the many that a row has.
    """
    band = 16 * torch.finfo(torch.float32).eps * exact.abs().max().clamp(min=1)
    return float(2 * ((plain.double() - exact).abs().max() + band))


DECAYS = {
    "near 1": lambda size, random: 1e-6 * torch.rand(size, generator=random),
    "near 0": lambda size, random: 100 * torch.rand(size, generator=random),
    "both": lambda size, random: 10 ** (torch.rand(size, generator=random) * 8 - 6),
    "1 and 0": lambda size, random: torch.where(torch.rand(size, generator=random) < 0.1, torch.inf, 0.0),
}
LENGTHS = [1, 7, 63, 64, 65, 1000, pytest.param(8000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_gated_delta_is_as_exact_as_row_by_row(length: int, decays: str) -> None:
    """Keys that are alike, and writes of almost the whole change, for which a series of powers has no correct digit."""
    random = torch.Generator().manual_seed(length)
    rows = delta_rows(length, 4, 2, 16, 8, random)
    log_decay, beta = -DECAYS[decays]((length, 4), random), 1 - 0.1 * rows.beta
    rows, states = rows._replace(log_decay=log_decay, beta=beta), torch.randn(4, 4, 16, 8, generator=random)
    request = [Request(length, 2, {length - 1: 3})]
    exact, after = by_definition(request, states.double(), double(rows), delta(True))
    plain, plain_after = by_definition(request, states, rows, delta(True))
    found = gated_delta(rows, states, plan(request), implementation="tiled")
    assert float((found - exact).abs().max()) <= budget(plain, exact)
    assert float((states - after)[1:].abs().max()) <= budget(plain_after, after)


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_state_space_is_as_exact_as_row_by_row(length: int, decays: str) -> None:
    random = torch.Generator().manual_seed(length)
    rows = space_rows(length, 4, 8, 2, 16, random)
    # an infinite step would add an infinite row
    dt = DECAYS[decays]((length, 4), random).clamp(max=1e4)
    rows, states = rows._replace(dt=dt), torch.randn(4, 4, 8, 16, generator=random)
    a = -torch.tensor([1.0, 0.5, 3.0, 1.0])
    request = [Request(length, 2, {length - 1: 3})]
    exact, after = by_definition(request, states.double(), double(rows), space(a.double(), None))
    plain, plain_after = by_definition(request, states, rows, space(a, None))
    found = state_space(rows, a, None, states, plan(request), implementation="tiled")
    assert float((found - exact).abs().max()) <= budget(plain, exact)
    assert float((states - after)[1:].abs().max()) <= budget(plain_after, after)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_requests_cut_anywhere(data: st.DataObject) -> None:
    """Each step takes some rows of each request, and later ones continue from the states that it kept."""
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    few, width = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 8, 16]))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    whole = [Request(length, ZEROS, {length - 1: 2 + index}) for index, length in enumerate(lengths)]
    count, states = sum(lengths), torch.full((2 + len(lengths), 2, 4, 3), torch.nan, dtype=torch.float64)
    states[ZEROS] = 0
    deltas = DeltaRows(*double(delta_rows(count, 2, 1, 4, 3, random)))
    spaces = SpaceRows(*double(space_rows(count, 2, 4, 1, 3, random)))
    a, weight = -torch.ones(2, dtype=torch.float64), torch.randn(3, 4, generator=random, dtype=torch.float64)
    x, past = deltas.v[:, 0].contiguous(), torch.full((len(states), 3, 3), torch.nan, dtype=torch.float64)
    past[ZEROS] = 0
    wanted = (
        by_definition(whole, states, deltas, delta(True)),
        by_definition(whole, states, spaces, space(a, None)),
        by_definition(whole, past, [x], convolution(weight, None, True)),
    )
    kept = states.clone(), states.clone(), past.clone()
    found = [torch.full_like(each, torch.nan) for each, _ in wanted]
    starts, done = np.cumsum([0, *lengths[:-1]]), [0] * len(lengths)
    while any(behind < length for behind, length in zip(done, lengths, strict=True)):
        requests, rows = [], []
        for index, length in enumerate(lengths):
            if done[index] < length:
                some = data.draw(st.integers(1, length - done[index]))
                requests.append(Request(some, 2 + index if done[index] else ZEROS, {some - 1: 2 + index}))
                rows.extend(range(starts[index] + done[index], starts[index] + done[index] + some))
                done[index] += some
        step, ids = plan(requests, few, width), torch.tensor(rows)
        found[0][ids] = gated_delta(DeltaRows(*(each[ids] for each in deltas)), kept[0], step, implementation="tiled")
        found[1][ids] = state_space(
            SpaceRows(*(each[ids] for each in spaces)), a, None, kept[1], step, implementation="tiled"
        )
        found[2][ids] = causal_conv1d(x[ids], weight, None, kept[2], step, silu=True)
    for results, after, (exact, exact_after) in zip(found, kept, wanted, strict=True):
        assert_same(results, after, (exact, exact_after), 1e-9)


@pytest.mark.parametrize("width", [1, 2, 4, 64])
def test_inverse_by_blocks(width: int) -> None:
    """Keys are almost equal, and each row replaces the value of its key whole."""
    lower = torch.full((3, width, width), 0.99, dtype=torch.float32).tril(-1)
    found = inverse_of_unit_lower(lower)
    exact = torch.linalg.inv(lower.double() + torch.eye(width, dtype=torch.float64))
    # a triangular solve is off by as many units of the last place
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2 * width * torch.finfo(torch.float32).eps)


def test_a_row_is_kept_in_two_slots() -> None:
    """After a block and for the request itself; not in a request with few rows."""
    request = Request(6, ZEROS, {5: 4})
    starts, sources = np.array([0, 6]), np.array([ZEROS])
    arrays = plan_state_rows(starts, sources, np.array([5, 3, 5]), np.array([4, 2, 3]), width=4)
    assert arrays["tile_targets"].tolist() == [2, 4, 3]
    assert arrays["tile_rows"].tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [-1, -1, -1, -1]]
    assert arrays["tile_sources"].tolist() == [ZEROS, -1, -1]
    assert plan([request], width=4).tile_targets.tolist() == [NULL, 4]
    with pytest.raises(ValueError, match="at most 6 rows kept in two slots, expected one"):
        plan_state_rows(starts, sources, np.array([5, 5]), np.array([4, 2]), few=6)
    with pytest.raises(ValueError, match="found tiles of 48 rows, expected a power of two"):
        plan([request], width=48)


@pytest.mark.parametrize("rows", [1, 64, 100])
def test_a_step_of_one_prompt_is_as_it_would_be_planned(rows: int) -> None:
    found = StateRows.of_one_prompt(rows, torch.device("cpu"))
    # one row is a prompt here, too
    planned = plan([Request(rows, ZEROS, {rows - 1: 2})], few=0)
    for name in StateRows._fields:
        if not name.startswith("few"):
            assert torch.equal(getattr(found, name), getattr(planned, name)), name
        assert (getattr(found, name).numel() == 0) == name.startswith("few")


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
