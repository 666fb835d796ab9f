"""Which blocks of a row are always attended, and how many more are chosen: the engine's own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.sparse_step import Step
from vllm_gaudi_ucm.sparse.budget import Budget as BlockBudget
from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.options import BlockOptions


@dataclass(frozen=True)
class Budget:
    """The budget of `sparse_ratio` with the engine's default windows and minima. Short contexts are sparse, too."""

    ratio: float

    @cached_property
    def _options(self) -> BlockOptions:
        return BlockOptions(sparse_ratio=self.ratio, min_tokens=1)

    def _of_rows(self, step: Step) -> list[BlockBudget]:
        """Returns the budget of each row. A context without candidates is attended as a whole."""
        found = []
        for context, blocks in zip(step.contexts.tolist(), step.row_blocks.tolist(), strict=True):
            found.append(block_budget(context, step.block_size, self._options) or BlockBudget(blocks, blocks, 0))
        return found

    def live(self, step: Step) -> Tensor:
        """Returns bool [rows, blocks]: sinks, local window and tail block."""
        return (torch.arange(step.num_blocks) < step.row_blocks[:, None]) & ~self.candidates(step)

    def candidates(self, step: Step) -> Tensor:
        """Returns bool [rows, blocks]: the blocks between, which are full."""
        budgets, number = self._of_rows(step), torch.arange(step.num_blocks)
        first, end = (torch.tensor(one)[:, None] for one in zip(*((b[0], b[1]) for b in budgets), strict=True))
        return (number >= first) & (number < end)

    def num_selected(self, step: Step) -> Tensor:
        """Returns int64 [rows]: how many candidates are chosen."""
        return torch.tensor([budget.num_selected for budget in self._of_rows(step)])
