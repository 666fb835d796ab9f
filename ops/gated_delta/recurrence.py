"""One row of the gated delta rule, which several implementations compute for decodes, and how its inputs are scaled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.gated_delta.implementation import DeltaRows


def scaled(rows: DeltaRows, wide: torch.dtype, *, normalise: bool) -> DeltaRows:
    """Returns q and k divided by their length if asked for, and q / sqrt(key_dim), in the dtype `wide`."""
    q, k = rows.q.to(wide), rows.k.to(wide)
    if normalise:
        q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (q, k))
    return rows._replace(q=q * q.shape[-1] ** -0.5, k=k)


def update(state: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Computes the state after a row, [lanes, heads, key_dim, value_dim], in place.

    inputs: one row of `DeltaRows` for each lane, scaled, in the dtype of the state. See `gated_delta`.
    Returns the results of the row, [lanes, heads, value_dim].
    """
    row = DeltaRows(*inputs)
    repeats = state.shape[1] // row.k.shape[1]
    q, k = row.q.repeat_interleave(repeats, 1), row.k.repeat_interleave(repeats, 1)
    state.mul_(torch.exp(row.log_decay)[..., None, None])
    there = torch.matmul(k.unsqueeze(-2), state).squeeze(-2)
    delta = (row.v - there) * row.beta.unsqueeze(-1)
    # Gaudi's software is known to have addcmul, and not the one in place
    state.copy_(torch.addcmul(state, k.unsqueeze(-1), delta.unsqueeze(-2)))
    return torch.matmul(q.unsqueeze(-2), state).squeeze(-2)
