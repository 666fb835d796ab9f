"""Decides whether choosing blocks makes a step faster, by estimated costs and savings in seconds, from sizes alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.sparse.budget import Budget, block_budget, shortest_sparse_context
from vllm_gaudi_ucm.sparse.selection.selection_limits import SCORED_ROWS

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sparse.options import BlockOptions


class PromptCost(NamedTuple):
    """row_flops: operations of a row's attention to a block, in one layer on one device. score_flops: of its score of a
    block. flops: operations per second.
    """

    row_flops: float
    score_flops: float
    flops: float


FREE = PromptCost(0.0, 0.0, 1.0)
"""Attention without cost, with which no prompt chooses."""


@dataclass(frozen=True)
class ChoiceCost:
    """The costs of one server, the same for all of its ranks, because the scheduler decides for them.

    sparse_layers: layers that attend to chosen blocks. choosing_layers: those among them that choose.
    block_bytes: keys and values of a block in one layer on one device. summary_bytes: what
    its score moves there: its summary, and sign codes as floats on a device that writes them out.
    bandwidth: bytes per second that attention and scoring read.
    layer_seconds: fixed cost of a choice in a layer. step_seconds: fixed cost of a step with choices, on the host.
    prompts: what prompts cost, whose attention is bound by operations.
    """

    sparse_layers: int
    choosing_layers: int
    block_bytes: float
    summary_bytes: float
    bandwidth: float
    layer_seconds: float
    step_seconds: float
    prompts: PromptCost = FREE

    def pays(self, budgets: Iterable[Budget]) -> bool:
        """Returns whether a step in which these requests choose is faster than a step in which they are dense.

        A block that several requests share counts for each, although dense attention reads it once.
        """
        candidates = selected = 0
        for budget in budgets:
            candidates += budget.num_candidates
            selected += budget.num_selected
        saved = self.sparse_layers * (candidates - selected) * self.block_bytes
        read = self.choosing_layers * candidates * self.summary_bytes
        return (saved - read) / self.bandwidth > self._fixed_seconds

    def pays_for_prompt(self, budget: Budget, rows: int, tile_rows: int) -> bool:
        """Returns whether a prompt's chunk is faster if each tile of its rows chooses. The chunk is then a step of its
        own, next to the step of the other requests: the fixed cost of a step counts twice.
        """
        tiles = -(-rows // tile_rows)
        cost, left_out = self.prompts, budget.num_candidates - budget.num_selected
        saved = self.sparse_layers * left_out * rows * cost.row_flops
        scored = self.choosing_layers * min(tile_rows, SCORED_ROWS) * tiles * budget.num_candidates * cost.score_flops
        return (saved - scored) / cost.flops > self._fixed_seconds + self.step_seconds

    def shortest_context(self, block_size: int, options: BlockOptions, requests: int, longest: int) -> int | None:
        """Returns the tokens of the shortest contexts for which choosing pays off, in a step with `requests` such
        contexts; None if there are none up to `longest`.
        """

        def pays(context: int) -> bool:
            budget = block_budget(context, block_size, options)
            return budget is not None and self.pays([budget] * requests)

        first = shortest_sparse_context(block_size, options)
        contexts = range(first, longest + 1, block_size)
        place = bisect_left(contexts, True, key=pays)
        return contexts[place] if place < len(contexts) else None

    def pays_in_buckets(self, dense: float, sparse: float) -> bool:
        """Returns the same for steps that take these seconds in their buckets, in which every pad costs as much as a
        block.

        sparse: includes scores and the attention to chosen blocks.
        """
        return dense - sparse > self._fixed_seconds

    @property
    def _fixed_seconds(self) -> float:
        return self.step_seconds + self.choosing_layers * self.layer_seconds
