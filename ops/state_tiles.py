"""Products over the rows of tiles, which replace a recurrence: decays between rows, an inverse, and states of tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.narrow_floats import put
from vllm_gaudi_ucm.ops.state_rows import SAME_REQUEST, StateRows


def decays_between(log_decay: Tensor) -> Tensor:
    """Returns exp(sum of log_decay[j + 1 .. i]) for rows i >= j, and 0 for others: [..., width, width].

    log_decay: [..., width], not positive; minus infinity is allowed. Each sum is made of its own terms: a difference of
    two sums from the first row on would have the error of the larger one, which a decay near 0 makes large.
    """
    width = log_decay.shape[-1]
    index = torch.arange(width, device=log_decay.device)
    behind, above = index.unsqueeze(1) > index, index.unsqueeze(1) < index
    terms = log_decay.unsqueeze(-1).expand(*log_decay.shape, width).masked_fill(~behind, 0)
    return terms.cumsum(-2).exp().masked_fill(above, 0)


def inverse_of_unit_lower(lower: Tensor) -> Tensor:
    """Returns the inverse of I + lower, for a matrix with entries below the diagonal only: [..., width, width].

    width: a power of two. By products of blocks: the inverse of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']]. It is as
    exact as a triangular solve. A series of powers of `lower` is the same on paper, but its powers grow before they
    vanish, and have no correct digit at 64 rows with keys that are alike.
    """
    width = lower.shape[-1]
    if width == 1:
        return torch.ones_like(lower)
    half = width // 2
    if half == 1:
        first = second = torch.ones_like(lower[..., :1, :1])
        corner = -lower[..., 1:, :1]
    else:
        both = torch.stack((lower[..., :half, :half], lower[..., half:, half:]))
        first, second = inverse_of_unit_lower(both).unbind(0)
        corner = -torch.matmul(second, torch.matmul(lower[..., half:, :half], first))
    upper = torch.cat((first, torch.zeros_like(corner)), -1)
    return torch.cat((upper, torch.cat((corner, second), -1)), -2)


class TileChange(NamedTuple):
    """Says how tiles change a state: the one after a tile is decay * state + added - replaced @ state.

    added: [tiles, heads, rows, columns]. decay: [tiles, heads, 1, 1]. replaced: [tiles, heads, rows, rows]; None: zero.
    All of one dtype.
    """

    added: Tensor
    decay: Tensor
    replaced: Tensor | None = None


def carry_states(step: StateRows, states: Tensor, change: TileChange) -> Tensor:
    """Computes the state after each tile from the one before it, and writes them to `states`, in place.

    states: [slots, heads, rows, columns]. Returns the states before the tiles, [tiles, heads, rows, columns], in the
    dtype of the change.
    """
    added, decay, replaced = change
    loaded = states.index_select(0, step.tile_sources.clamp(min=0)).to(added.dtype)
    is_same = (step.tile_sources == SAME_REQUEST).view(-1, 1, 1, 1)
    before, after = [], [loaded[:1]]
    for tile in range(len(loaded)):
        part = slice(tile, tile + 1)
        state = torch.where(is_same[part], after[-1], loaded[part])
        before.append(state)
        new = torch.addcmul(added[part], state, decay[part])
        after.append(new if replaced is None else new - torch.matmul(replaced[part], state))
    put(states, 0, step.tile_targets, torch.cat(after[1:]).to(states.dtype))
    return torch.cat(before)
