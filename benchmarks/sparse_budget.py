"""Computes which blocks of a row are always attended, and how many more the budget allows, as in GSA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Budget:
    """`ratio` of a row's blocks, at least `min_blocks`, of which `sinks` first and `window` last ones are set.

    Source: seed 000, 5.1 (`_select_blocks`). The window holds the tail block, so every other block is full.
    """

    ratio: float
    sinks: int = 1
    window: int = 2
    min_blocks: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1 or self.sinks < 0 or self.window < 1:
            raise ValueError(f"{self}: expected a ratio in (0, 1], no negative sinks, and a window of at least 1")

    def live(self, blocks: Tensor, width: int) -> Tensor:
        """Bool `[rows, width]`: sinks and window of rows whose contexts have `blocks` (int64 `[rows]`) blocks."""
        number, end = torch.arange(width), blocks[:, None]
        return (number < end) & ((number < self.sinks) | (number >= end - self.window))

    def candidates(self, blocks: Tensor, width: int) -> Tensor:
        """Bool `[rows, width]`: the blocks between."""
        return (torch.arange(width) < blocks[:, None]) & ~self.live(blocks, width)

    def num_selected(self, blocks: Tensor, width: int) -> Tensor:
        """Int64 `[rows]`: how many candidates are selected."""
        total = torch.minimum((blocks * self.ratio).long().clamp(min=self.min_blocks), blocks)
        selected = (total - self.live(blocks, width).sum(1)).clamp(min=0)
        return torch.minimum(selected, self.candidates(blocks, width).sum(1))
