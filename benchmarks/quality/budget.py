"""Which blocks of a row are always attended, and how many more are chosen: the engine's own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.sparse_step import Step
from vllm_gaudi_ucm.sparse.budget import Budget as BlockBudget
from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.options import BlockOptions


class Limits(NamedTuple):
    """Int64 [rows]: the candidates of each row are the blocks [first, end), `num_selected` of them chosen."""

    first: Tensor
    end: Tensor
    num_selected: Tensor


@dataclass(frozen=True)
class Budget:
    """The budget of `sparse_ratio` with the engine's default windows and minima. Short contexts are sparse, too."""

    ratio: float

    def limits(self, step: Step) -> Limits:
        """Returns the limits of each row. A context without candidates is attended as a whole."""
        return _limits(self.ratio, step.block_size, tuple(step.contexts.tolist()))

    def live(self, step: Step) -> Tensor:
        """Returns bool [rows, blocks]: sinks, local window and tail block."""
        return (torch.arange(step.num_blocks) < step.row_blocks[:, None]) & ~self.candidates(step)

    def candidates(self, step: Step) -> Tensor:
        """Returns bool [rows, blocks]: the blocks between, which are full."""
        limits, number = self.limits(step), torch.arange(step.num_blocks)
        return (number >= limits.first[:, None]) & (number < limits.end[:, None])

    def num_selected(self, step: Step) -> Tensor:
        """Returns int64 [rows]: how many candidates are chosen."""
        return self.limits(step).num_selected


@lru_cache(maxsize=256)
def _limits(ratio: float, block_size: int, contexts: tuple[int, ...]) -> Limits:
    """Returns what all layers of a step share. Made for each of them, it took a fifth of a measurement's time."""
    options, found = BlockOptions(sparse_ratio=ratio, min_tokens=1), []
    for context in contexts:
        blocks = -(-context // block_size)
        found.append(block_budget(context, block_size, options) or BlockBudget(blocks, blocks, 0))
    return Limits(*(torch.tensor(one) for one in zip(*found, strict=True)))
