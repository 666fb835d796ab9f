"""The choice that the rows of one verification share, and that a lock keeps for several verifications."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.sparse_step import Step
from vllm_gaudi_ucm.ops.block_selection.api import block_scores, new_summaries, write_summaries
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.sparse.budget import Budget, block_budget
from vllm_gaudi_ucm.sparse.options import BlockOptions


class SharedChoice:
    """The policy of a verification (see `benchmarks.sparse_rows`): as GSA chooses, or as KVStar locks.

    options: ratio, windows and summary. lock: verifications that a choice serves; 1 chooses again in each.
    """

    def __init__(self, options: BlockOptions, lock: int = 1) -> None:
        self._options, self._lock = options, lock
        self._verifications = 0
        self._budget: Budget | None = None
        self._chosen: dict[int, Tensor] = {}
        self._summaries: dict[int, Tensor] = {}

    def __call__(self, step: Step) -> Tensor | None:
        """Bool `[rows, blocks]`, None for everything. Layer 0 is asked first; row 0 is the certain token."""
        if step.layer == 0:
            if self._verifications % self._lock == 0:
                self._budget = block_budget(int(step.contexts[0]), step.block_size, self._options)
                self._chosen.clear()
            self._verifications += 1
        if self._budget is None:
            return None
        if step.layer not in self._chosen:
            self._chosen[step.layer] = self._choose(step, self._budget)
        attended = torch.zeros(step.num_blocks, dtype=torch.bool)
        attended[: self._budget.sink_blocks] = attended[self._budget.window_start :] = True
        attended[self._chosen[step.layer]] = True
        return attended.expand(len(step.query), -1)

    def _choose(self, step: Step, budget: Budget) -> Tensor:
        """Int64 `[num_selected]` logical blocks."""
        candidates = torch.arange(budget.sink_blocks, budget.window_start)
        one, none = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        rows, kind = len(step.query), SummaryKind(self._options.summary)
        scores = block_scores(
            step.query,
            self._summarised(step, budget.window_start, kind),
            candidates,
            torch.zeros_like(candidates),
            none,
            rows * one,
            rows,
            step.scale,
            kind,
        )
        return candidates[scores.topk(budget.num_selected).indices]

    def _summarised(self, step: Step, num_blocks: int, kind: SummaryKind) -> Tensor:
        """Computes summaries of the layer's first blocks; existing ones are kept."""
        known = self._summaries.get(step.layer)
        first = 0 if known is None else len(known)
        keys = step.keys[first * step.block_size : num_blocks * step.block_size].unflatten(0, (-1, step.block_size))
        if num_blocks > first:
            added = new_summaries(keys, kind)
            write_summaries(keys, torch.arange(len(keys)), added, kind)
            self._summaries[step.layer] = added if known is None else torch.cat((known, added))
        return self._summaries[step.layer]
