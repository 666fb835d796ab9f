"""The gated delta rule on any device: decodes row by row, and prompts as products over the rows of tiles.

Static shapes, and nothing is read on the host, so it may be captured and traced.

If S is the state before a tile, row i changes the value of its key by u_i - w_i S. A triangular system without S yields
u and w. So the state after a tile is M S + N, and only this product waits for the tile before.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.gated_delta.implementation import DeltaImplementation, DeltaRows
from vllm_gaudi_ucm.ops.gated_delta.recurrence import scaled, update
from vllm_gaudi_ucm.ops.state_rows import NO_ROW, StateRows, collect, recur_few, take_rows, wide_dtype
from vllm_gaudi_ucm.ops.state_tiles import TileChange, carry_states, decays_between, inverse_of_unit_lower


class TiledDelta(DeltaImplementation):
    """Products over the rows of tiles."""

    priority: ClassVar[int] = 5

    def scan(self, rows: DeltaRows, states: Tensor, step: StateRows, *, normalise: bool) -> Tensor:
        wide = wide_dtype(states, rows.v)
        inputs = scaled(rows, wide, normalise=normalise)
        of_few = recur_few(step, states, inputs, update) if step.few_rows.numel() else None
        of_tiles = scan_tiles(inputs, states, step, wide) if step.tile_rows.numel() else None
        return collect(step, of_few, of_tiles).to(rows.v.dtype)


def scan_tiles(rows: DeltaRows, states: Tensor, step: StateRows, wide: torch.dtype) -> Tensor:
    """Computes prompts; returns [tiles, width, heads, value_dim]. rows: scaled. Tensors as in `gated_delta`."""
    repeats = rows.v.shape[1] // rows.k.shape[1]
    is_pad = step.tile_rows == NO_ROW
    # [tiles, heads, width, ...]: a pad neither decays a state nor changes it
    q, k, v, log_decay, beta = (take_rows(each, step.tile_rows).to(wide).transpose(1, 2) for each in rows)
    log_decay, beta = (each.masked_fill(is_pad.unsqueeze(1), 0) for each in (log_decay, beta))
    pads = is_pad[:, None, :, None]
    k, v = k.masked_fill(pads, 0), v.masked_fill(pads, 0)
    between, from_start = decays_between(log_decay), log_decay.cumsum(-1).exp().unsqueeze(-1)
    of_keys, of_queries = (
        torch.matmul(each, k.transpose(-1, -2)).repeat_interleave(repeats, 1) * between for each in (k, q)
    )
    q, k, beta = q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1), beta.unsqueeze(-1)
    inverse = inverse_of_unit_lower((of_keys * beta).tril(-1))
    u, w = torch.matmul(inverse, torch.cat((v, k * from_start), -1) * beta).split([v.shape[-1], k.shape[-1]], -1)
    kept = (k * between[..., -1, :].unsqueeze(-1)).transpose(-1, -2)
    change = TileChange(torch.matmul(kept, u), from_start[..., -1:, :], torch.matmul(kept, w))
    before = carry_states(step, states, change)
    carried = torch.matmul(q * from_start - torch.matmul(of_queries, w), before)
    return (torch.matmul(of_queries, u) + carried).transpose(1, 2)
