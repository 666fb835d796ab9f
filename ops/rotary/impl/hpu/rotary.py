"""Rotary position embedding by Gaudi's fused operator: halves (NeoX style) or pairs of a head are rotated."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Modes of `hpu::rotary_pos_embedding`: halves, with angles twice in a row; and pairs, with each angle twice.
BLOCKWISE, PAIRWISE = 0, 1
# (x [tokens, heads, width], sin, cos [tokens, 1, width], position ids, offset, mode); sin comes before cos
FusedRotary = Callable[[Tensor, Tensor, Tensor, Tensor | None, int, int], Tensor]


class RotaryTables(NamedTuple):
    """Cosines and sines, each [positions, width] with memory of its own: slices of one tensor would be two recipes."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def from_angles(cls, angles: Tensor, is_neox: bool) -> RotaryTables:
        """Builds the tables of angles [positions, width], the cosines of width / 2 angles before their sines."""
        cos, sin = (cls._spread(half, is_neox) for half in angles.chunk(2, -1))
        return cls(cos, sin)

    @staticmethod
    def _spread(half: Tensor, is_neox: bool) -> Tensor:
        return torch.cat((half, half), -1) if is_neox else half.repeat_interleave(2, -1)

    def at(self, positions: Tensor, dtype: torch.dtype) -> RotaryTables:
        """[tokens, 1, width] in dtype: with a single float32 argument the operator would compute and return float32."""
        cos, sin = (table.index_select(0, positions).unsqueeze(1).to(dtype) for table in self)
        return RotaryTables(cos, sin)


def gaudi_rotate(x: Tensor, angles: RotaryTables, head_size: int, is_neox: bool, fused: FusedRotary) -> Tensor:
    """Rotates the first elements of every head of x [tokens, heads * head_size], as many as the angles are wide.

    angles: for these tokens, from `RotaryTables.at`, in the dtype of x. Returns a new tensor of the shape of x.
    """
    heads = x.reshape(x.shape[0], -1, head_size)
    width, mode = angles.cos.shape[-1], BLOCKWISE if is_neox else PAIRWISE
    rotated = fused(heads[..., :width], angles.sin, angles.cos, None, 0, mode)
    if width < head_size:
        rotated = torch.cat((rotated, heads[..., width:]), -1)
    return rotated.reshape(x.shape)
