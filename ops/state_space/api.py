"""State-space layers over the rows of requests: validates, and calls the implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.registry import AUTO
from vllm_gaudi_ucm.ops.state_rows import StateRows
from vllm_gaudi_ucm.ops.state_space.implementation import STATE_SPACES, SpaceRows


def state_space(
    rows: SpaceRows,
    a: Tensor,
    d: Tensor | None,
    states: Tensor,
    step: StateRows,
    *,
    implementation: str = AUTO,
) -> Tensor:
    """S = exp(dt * a) S + dt * x b^T, then y = S c + d * x, for each head, row after row of a request (Mamba-2).

    rows.x: [rows, heads, head_dim]. rows.dt: [rows, heads], not negative: bias and softplus are already applied.
    rows.b, rows.c: [rows, groups, state]; head h reads group h // (heads // groups).
    a: [heads], negative. d: [heads], or None for none.
    states: [slots, heads, head_dim, state], written in place, as `step` says.

    Returns [rows, heads, head_dim] in the dtype of x. Numbers in between are float32, or float64 for float64.
    Raises ValueError if shapes do not match (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _validate(rows, a, d, states, step)
    return STATE_SPACES.choose(implementation, rows.x.device.type).scan(rows, a, d, states, step)


def time_steps(dt: Tensor, bias: Tensor, *, implementation: str = AUTO) -> Tensor:
    """Returns softplus(dt + bias) for `SpaceRows`, float32. dt: [rows, heads]. bias: [heads]."""
    return STATE_SPACES.choose(implementation, dt.device.type).time_steps(dt, bias)


def _validate(rows: SpaceRows, a: Tensor, d: Tensor | None, states: Tensor, step: StateRows) -> None:
    _, heads, head_dim, size = states.shape
    count, groups = len(step.places), rows.b.shape[1]
    if heads % groups:
        raise ValueError(f"state_space: {heads} heads and {groups} groups, expected a multiple of the groups")
    wanted = {
        "x": (rows.x, (count, heads, head_dim)),
        "dt": (rows.dt, (count, heads)),
        "b": (rows.b, (count, groups, size)),
        "c": (rows.c, (count, groups, size)),
        "a": (a, (heads,)),
        "d": (a if d is None else d, (heads,)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"state_space: {name} is {tuple(tensor.shape)}, expected {shape}")
