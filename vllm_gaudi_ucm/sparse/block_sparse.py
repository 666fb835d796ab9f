"""The base class of methods that choose blocks by their summaries: budgets in the scheduler, scores in the worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection, SelectionMode, SparseMeta
from vllm_gaudi_ucm.sparse.base import UcmSparseBase, UcmSparseRole
from vllm_gaudi_ucm.sparse.budget import (
    Budget,
    HasGaps,
    block_budget,
    decode_rows,
    no_gaps,
    prompt_budget,
    prompt_chunks,
)
from vllm_gaudi_ucm.sparse.options import BlockOptions, MethodOptions
from vllm_gaudi_ucm.sparse.step_sizes import StepSeconds, step_sizes

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gaudi_ucm.sparse.choice_cost import ChoiceCost
    from vllm_gaudi_ucm.vllm_api.steps import Request, SchedulerOutput


# Fewer rows of a prompt are dense: they would be a step of their own, which reads all weights.
LEAST_ROWS = 64


@dataclass
class _Held:
    """A budget whose selection serves several steps. Its window is kept, so every newer token is attended."""

    budget: Budget
    steps: int = 1


class BlockSparse(UcmSparseBase):
    """Selects blocks by scores. A subclass sets its options; it may override `reuse_steps` and `block_scores`.

    In the worker, a separate `BlockSelector` makes the choice and calls the method's `block_scores`.

    Args:
        has_gaps: returns which contexts have blocks off the device, in the scheduler with KV offload.
    """

    Options: ClassVar[type[MethodOptions]] = BlockOptions

    def __init__(
        self,
        role: UcmSparseRole,
        config: Mapping[str, Any] | MethodOptions | None = None,
        has_gaps: HasGaps = no_gaps,
    ) -> None:
        super().__init__(role, config)
        self.block_options = _block_options(self)
        self.block_size: int | None = None
        self.has_gaps = has_gaps
        self.choice_cost: ChoiceCost | None = None
        """The cost by which a step is dense if a choice does not pay off; None: every step with a budget is sparse."""
        self._step_seconds: StepSeconds | None = None
        self.dense_steps = 0
        """Number of steps that were dense because a choice would not have paid off."""
        self._held: dict[str, _Held | None] = {}
        # a step that was dense because a choice would not have paid off: its requests, and how many further steps of
        # the same requests have the same blocks, and therefore the same result
        self._dense: dict[str, int] = {}
        self._dense_left = 0

    @classmethod
    def decides_by_counts(cls, options: MethodOptions) -> bool:
        """Returns False for a subclass that builds its own selections, which has to override this method."""
        return cls.build_sparse_meta is BlockSparse.build_sparse_meta

    @property
    def reuse_steps(self) -> int:
        return 1

    @property
    def reuse_layers(self) -> int:
        """Number of consecutive layers that share a selection."""
        return 1

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return ()

    def block_scores(self, layer_idx: int, query: Tensor, candidates: Any) -> Tensor | None:
        """Returns scores for the candidates of a layer, float32 [candidates]; None: the summaries' scores are used.

        Runs on the device inside captured graphs: static shapes, no reads from the host. With tensor parallelism, query
        and summaries have this rank's heads; blocks are chosen by the mean over the ranks, or as `scores_over_ranks`
        specifies.

        Args:
            query: [rows, heads, dim].
            candidates: `vllm_gaudi_ucm.sparse.selection.layer_selector.CandidateBlocks`.
        """
        return None

    # --- scheduler role ---

    def register_block_size(self, block_size: int) -> None:
        self.block_size = block_size

    def register_choice_cost(self, choice_cost: ChoiceCost) -> None:
        """Called once, before the first step, if steps may be dense because a choice does not pay off."""
        self.choice_cost = choice_cost
        self._dense_left = 0

    def register_step_seconds(self, step_seconds: StepSeconds) -> None:
        """Called once the times of steps in buckets are known, if pads cost as much as blocks."""
        self._step_seconds = step_seconds
        self._dense_left = 0

    def request_begin(self, request_id: str, prompt_token_ids: Sequence[int]) -> None:
        self._held[request_id] = None
        self._dense_left = 0

    def request_preempted(self, request_id: str) -> None:
        self._dense_left = 0
        if request_id in self._held:
            self._held[request_id] = None

    def request_finished_in_scheduler(self, request_id: str) -> None:
        self._dense_left = 0
        self._held.pop(request_id, None)

    def build_sparse_meta(self, scheduler_output: SchedulerOutput, requests: Mapping[str, Request]) -> SparseMeta:
        """Returns a budget for every decode of a request that has begun, if its context is long enough; see
        `decode_rows`.

        All of them are dense if their choices together would not pay off.
        """
        if self._stays_dense(scheduler_output):
            self.dense_steps += 1
            return SparseMeta(dense_steps=self.dense_steps)
        prompts = self._select_for_prompts(scheduler_output, requests)
        budgets: dict[str, Budget] = {}
        left = self._known_block_size()
        for row in decode_rows(scheduler_output, requests, self.has_gaps):
            if row.request_id in self._held:
                budget = self._budget(row.request_id, row.context_tokens)
                if budget is not None:
                    budgets[row.request_id] = budget
                    left = min(left, -row.context_tokens % self._known_block_size())
        is_dense = False
        if budgets and self.choice_cost is not None and not self._pays(self.choice_cost, scheduler_output, budgets):
            self.dense_steps += 1
            drafts = scheduler_output.scheduled_spec_decode_tokens
            is_dense = not drafts and budgets.keys() == scheduler_output.num_scheduled_tokens.keys()
            budgets.clear()
        meta = SparseMeta(prompts, dense_steps=self.dense_steps)
        for request_id, budget in budgets.items():
            meta.requests[request_id] = self._select(request_id, budget)
        for request_id in scheduler_output.num_scheduled_tokens:
            # a dense step in between makes the next selection a new one
            if request_id not in budgets:
                self.request_preempted(request_id)
        # until a block is full or another one begins
        self._dense_left = max(0, left - 1) if is_dense else 0
        self._dense = dict(scheduler_output.num_scheduled_tokens) if self._dense_left else {}
        return meta

    def _select_for_prompts(
        self, scheduler_output: SchedulerOutput, requests: Mapping[str, Request]
    ) -> dict[str, RequestSelection]:
        """Returns the selections of prompts' chunks, each of which pays off by itself, because it runs by itself."""
        options, found = self.block_options, dict[str, RequestSelection]()
        if options.prompt_ratio is None:
            return found
        for request_id, cached, rows in prompt_chunks(scheduler_output, requests):
            budget = prompt_budget(cached, self._known_block_size(), options) if request_id in self._held else None
            if budget is None:
                continue
            if rows < LEAST_ROWS:
                continue
            if self.choice_cost is not None and not self.choice_cost.pays_for_prompt(budget, rows, options.prompt_tile):
                self.dense_steps += 1
                continue
            selection = RequestSelection(SelectionMode.SELECT, *budget, tile_rows=options.prompt_tile)
            found[request_id] = selection
        return found

    def _stays_dense(self, scheduler_output: SchedulerOutput) -> bool:
        """Returns whether a step repeats the requests of the previous one, each with one more token in the same block,
        and the previous one was dense because a choice would not have paid off. No selection is stored for any of them.
        """
        if not self._dense_left or scheduler_output.num_scheduled_tokens != self._dense:
            return False
        if scheduler_output.scheduled_spec_decode_tokens or scheduler_output.scheduled_new_reqs:
            return False
        self._dense_left -= 1
        return True

    def _pays(self, cost: ChoiceCost, scheduler_output: SchedulerOutput, budgets: Mapping[str, Budget]) -> bool:
        if self._step_seconds is not None:
            sizes = step_sizes(scheduler_output, budgets, self._known_block_size())
            dense, sparse = map(self._step_seconds, sizes)
            if dense is not None and sparse is not None:
                return cost.pays_in_buckets(dense, sparse)
        return cost.pays(budgets.values())

    def _budget(self, request_id: str, context_tokens: int) -> Budget | None:
        """Returns the budget of the selection that is still in use, or a new one; None: the context is dense."""
        held = self._held[request_id]
        if held is not None and held.steps < self.reuse_steps:
            return held.budget
        return block_budget(context_tokens, self._known_block_size(), self.block_options)

    def _select(self, request_id: str, budget: Budget) -> RequestSelection:
        held = self._held[request_id]
        if held is not None and held.steps < self.reuse_steps:
            held.steps += 1
            return RequestSelection(SelectionMode.REUSE, *budget)
        self._held[request_id] = _Held(budget)
        return RequestSelection(SelectionMode.SELECT, *budget)

    def _known_block_size(self) -> int:
        if self.block_size is None:
            raise RuntimeError(
                f"{type(self).__name__}.build_sparse_meta: found no block size, expected register_block_size to be "
                "called before the first step; call it once"
            )
        return self.block_size


def _block_options(method: UcmSparseBase) -> BlockOptions:
    if not isinstance(method.options, BlockOptions):
        raise TypeError(
            f"{type(method).__name__}.Options: found {type(method.options).__name__}, "
            "expected a subclass of BlockOptions"
        )
    return method.options
