"""State-space layers on any device: decodes row by row, and prompts as products over the rows of tiles.

Static shapes, and nothing is read on the host, so it may be captured and traced.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.state_rows import NO_ROW, StateRows, collect, recur_few, take_rows, wide_dtype
from vllm_gaudi_ucm.ops.state_space.implementation import SpaceImplementation, SpaceRows
from vllm_gaudi_ucm.ops.state_space.recurrence import add_skip, update
from vllm_gaudi_ucm.ops.state_tiles import TileChange, carry_states, decays_between


class TiledSpace(SpaceImplementation):
    """Products over the rows of tiles."""

    priority: ClassVar[int] = 5

    def scan(self, rows: SpaceRows, a: Tensor, d: Tensor | None, states: Tensor, step: StateRows) -> Tensor:
        of_few = recur_few(step, states, rows, partial(update, a=a)) if step.few_rows.numel() else None
        of_tiles = scan_tiles(rows, a, states, step) if step.tile_rows.numel() else None
        return add_skip(collect(step, of_few, of_tiles), rows.x, d).to(rows.x.dtype)


def scan_tiles(rows: SpaceRows, a: Tensor, states: Tensor, step: StateRows) -> Tensor:
    """Computes prompts; returns [tiles, width, heads, head_dim]. Tensors as in `state_space`."""
    by_group = rows.b.shape[1], rows.x.shape[1] // rows.b.shape[1]
    wide = wide_dtype(states, rows.x)
    is_pad = step.tile_rows == NO_ROW
    # [tiles, heads or groups, width, ...]: a pad neither decays a state nor adds to it
    x, dt, b, c = (take_rows(each, step.tile_rows).to(wide).transpose(1, 2) for each in rows)
    dt = dt.masked_fill(is_pad.unsqueeze(1), 0)
    pads = is_pad[:, None, :, None]
    values, b = (dt.unsqueeze(-1) * x).masked_fill(pads, 0), b.masked_fill(pads, 0)
    log_decay = dt * a.to(wide).unsqueeze(-1)
    between, from_start = decays_between(log_decay), log_decay.cumsum(-1).exp().unsqueeze(-1)
    # the heads of a group are columns of one product: b and c are not repeated for each
    kept = (values * between[..., -1, :].unsqueeze(-1)).transpose(-1, -2).unflatten(1, by_group).flatten(2, 3)
    added = torch.matmul(kept, b).unflatten(2, (by_group[1], -1)).flatten(1, 2)
    before = carry_states(step, states, TileChange(added, from_start[..., -1:, :])).unflatten(1, by_group).flatten(2, 3)
    carried = torch.matmul(c, before.transpose(-1, -2)).unflatten(-1, (by_group[1], -1))
    carried = carried.transpose(2, 3).flatten(1, 2) * from_start
    weights = (torch.matmul(c, b.transpose(-1, -2)).unsqueeze(2) * between.unflatten(1, by_group)).flatten(1, 2)
    return (torch.matmul(weights, values) + carried).transpose(1, 2)
