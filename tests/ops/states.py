"""Requests with states for tests: rows, slots, and each operation by definition in float64, request by request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.gated_delta.implementation import DeltaRows
from vllm_gaudi_ucm.ops.state_rows import NULL_SLOT, StateRows, plan_state_rows
from vllm_gaudi_ucm.ops.state_space.implementation import SpaceRows

NULL, ZEROS = NULL_SLOT, 1
"""The slot of pads, and the slot of zeros."""


@dataclass(frozen=True)
class Request:
    """A request of a step. source: slot from which it continues. kept: slots of the states after its rows, by row."""

    rows: int
    source: int = ZEROS
    kept: dict[int, int] = field(default_factory=dict)


# decodes, a verification whose states are kept row by row, a prompt that begins, one that continues and keeps the
# state after a block, and after its last row in two slots
STEP = (
    Request(1, 5, {0: 5}),
    Request(3, 6, {0: 6, 1: 7, 2: 8}),
    Request(9, ZEROS, {8: 9}),
    Request(11, 10, {3: 11, 10: 10}),
    Request(1, 13, {0: 13}),
)


def plan(requests: Sequence[Request], few: int = 1, width: int = 64) -> StateRows:
    starts = np.cumsum([0, *(each.rows for each in requests)])
    kept = [
        (start + row, at) for start, each in zip(starts[:-1], requests, strict=True) for row, at in each.kept.items()
    ]
    pairs = np.array(kept, np.int64).reshape(-1, 2)
    sources = np.array([each.source for each in requests], np.int64)
    arrays = plan_state_rows(starts, sources, pairs[:, 0], pairs[:, 1], few=few, width=width)
    return StateRows.from_tensors({name: torch.from_numpy(array) for name, array in arrays.items()})


def by_definition(
    requests: Sequence[Request],
    states: Tensor,
    inputs: Sequence[Tensor],
    one: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Computes every request alone, row after row. Returns results in the order of rows, and all states."""
    found, after, begin = [], states.clone(), 0
    for request in requests:
        state = states[request.source]
        for row in range(request.rows):
            state, result = one(state, *(each[begin + row] for each in inputs))
            found.append(result)
            if row in request.kept:
                after[request.kept[row]] = state
        begin += request.rows
    return torch.stack(found), after


def convolution(weight: Tensor, bias: Tensor | None, silu: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """One row of `causal_conv1d`."""

    def one(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.cat((state, x[None]))
        y = (rows * weight.T).sum(0) + (0 if bias is None else bias)
        return rows[1:], y * torch.sigmoid(y) if silu else y

    return one


def space(a: Tensor, d: Tensor | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """One row of `state_space`, head by head."""

    def one(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        group = torch.arange(len(a)) // (len(a) // len(b))
        state = state * torch.exp(dt * a)[:, None, None] + torch.einsum("h,hp,hn->hpn", dt, x, b[group])
        y = torch.einsum("hpn,hn->hp", state, c[group])
        return state, y if d is None else y + d[:, None] * x

    return one


def delta(normalise: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """One row of `gated_delta`, head by head."""

    def one(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        if normalise:
            q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        head = torch.arange(len(v)) // (len(v) // len(k))
        q, k = q[head] / q.shape[-1] ** 0.5, k[head]
        state = state * torch.exp(log_decay)[:, None, None]
        change = beta[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, change)
        return state, torch.einsum("hkv,hk->hv", state, q)

    return one


def double(tensors: Sequence[Any]) -> list[Any]:
    return [each.double() if isinstance(each, Tensor) else each for each in tensors]


def space_rows(count: int, heads: int, dim: int, groups: int, size: int, random: torch.Generator) -> SpaceRows:
    """Draws rows whose decays, with `a` of -1, go from almost 0 to almost 1."""
    dt = 10 ** (torch.rand(count, heads, generator=random) * 6 - 4)
    b, c = torch.randn(2, count, groups, size, generator=random)
    return SpaceRows(torch.randn(count, heads, dim, generator=random), dt, b, c)


def delta_rows(
    count: int, heads: int, key_heads: int, key_dim: int, value_dim: int, random: torch.Generator
) -> DeltaRows:
    """Draws rows whose decays go from almost 0 to almost 1, and whose keys are alike in many rows."""
    q, k = torch.randn(2, count, key_heads, key_dim, generator=random)
    k = k + 2 * torch.randn(key_heads, key_dim, generator=random)
    log_decay = -(10 ** (torch.rand(count, heads, generator=random) * 8 - 6))
    return DeltaRows(
        q,
        k,
        torch.randn(count, heads, value_dim, generator=random),
        log_decay,
        torch.rand(count, heads, generator=random),
    )
