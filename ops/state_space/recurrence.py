"""One row of a state-space layer, which several implementations compute for decodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.state_space.implementation import SpaceRows


def update(state: Tensor, inputs: Sequence[Tensor], a: Tensor) -> Tensor:
    """Computes the state after a row, [lanes, heads, head_dim, state], in place.

    inputs: one row of `SpaceRows` for each lane, in the dtype of the state. a: [heads]. See `state_space`.
    Returns the results of the row, [lanes, heads, head_dim].
    """
    row = SpaceRows(*inputs)
    repeats = state.shape[1] // row.b.shape[1]
    b, c = row.b.repeat_interleave(repeats, 1), row.c.repeat_interleave(repeats, 1)
    decay = torch.exp(row.dt * a.to(state.dtype))
    state.mul_(decay[..., None, None])
    # Gaudi's software is known to have addcmul, and not the one in place
    state.copy_(torch.addcmul(state, (row.dt.unsqueeze(-1) * row.x).unsqueeze(-1), b.unsqueeze(-2)))
    return torch.matmul(state, c.unsqueeze(-1)).squeeze(-1)


def add_skip(found: Tensor, x: Tensor, d: Tensor | None) -> Tensor:
    """Returns found + d * x, [rows, heads, head_dim], in the dtype of `found`."""
    return found if d is None else found + d.to(found.dtype).unsqueeze(-1) * x.to(found.dtype)
