"""Greedy drafts of a smaller model with the same vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.runner.batch_plan import BatchInput
from vllm_gaudi_ucm.runner.steady_plan import SteadyPlanner

if TYPE_CHECKING:
    from vllm_gaudi_ucm.runner.execution import Execution
    from vllm_gaudi_ucm.runner.request_table import RequestTable
    from vllm_gaudi_ucm.speculation.proposer import SampledStep


class DraftModelProposer:
    """See DraftProposer. Its K/V stand in the same blocks as the target's, in tensors of their own.

    In every step it computes what the target computed, and the new tokens with it: whatever block the target holds, and
    the prefix cache hands on, holds its K/V, too. K/V of drafts that were rejected are overwritten by the next step, as
    the target's are; a block is full, and may be shared, only of certain tokens.

    Args:
        execution: of the draft model, at true shapes.
        table: the tokens and block tables.
        block_size: tokens per cache block.
        max_model_len: of the draft model; a longer request gets no drafts any more.
    """

    def __init__(self, execution: Execution, table: RequestTable, block_size: int, max_model_len: int) -> None:
        self._execution = execution
        self._table = table
        self._block_size = block_size
        self._max_model_len = min(max_model_len, table.max_model_len)
        self._planner = SteadyPlanner(block_size)

    def propose(self, step: SampledStep) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in step.requests]
        rows = np.array([request.row for request in step.requests], np.int64)
        known, wanted = self._within_reach(step, rows)
        index = np.flatnonzero(known > step.batch.num_computed)
        begin = step.batch.num_computed.astype(np.int64)
        # the first round computes the certain tokens, each later one a draft of the round before
        while len(index):
            for at, token in self._run(rows[index], begin[index], known[index], wanted[index] > 0):
                request = int(index[at])
                drafts[request].append(token)
                if known[request] < self._table.max_model_len:
                    # behind the request's tokens, where the next step's drafts go, too
                    self._table.token_ids[rows[request], known[request]] = token
            begin = known
            known = known + 1
            wanted = wanted - 1
            index = np.flatnonzero(wanted > 0)
        return drafts

    def _within_reach(self, step: SampledStep, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """int64 [requests] each: tokens to compute now, counted from the beginning, and drafts wanted of them.

        Neither goes beyond the draft model's length or the blocks that a request holds.
        """
        batch = step.batch
        tokens = np.where(step.yields, self._table.num_tokens[rows], batch.num_computed + batch.num_scheduled)
        room = np.minimum(self._table.num_blocks[rows].astype(np.int64) * self._block_size, self._max_model_len)
        # a draft is computed for the next one only
        wanted = np.minimum(step.wanted, room - tokens + 1)
        return np.minimum(tokens, room).astype(np.int64), np.where(tokens > room, 0, wanted)

    def _run(
        self, rows: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64], drafts: NDArray[np.bool_]
    ) -> list[tuple[int, int]]:
        """Computes tokens [begin, end) of table rows; returns (index into rows, the likeliest next token) of those
        that get drafts."""
        table = self._table
        width = int(table.num_blocks[rows].max())
        batch = BatchInput(
            num_computed=begin.astype(np.int32),
            num_scheduled=(end - begin).astype(np.int32),
            # with a token more than is computed a request yields nothing
            num_tokens=(end + ~drafts).astype(np.int32),
            block_tables=table.block_tables[rows, :width],
        )
        plan = self._planner.plan(batch)
        tokens = table.token_ids[rows[plan.requests[plan.row_requests]], plan.positions].astype(np.int64)
        self._execution.stage(plan, tokens)
        self._execution.forward()
        count = len(plan.logits_rows)
        if not count:
            return []
        likeliest = self._execution.logits(plan.logits_rows)[:count].argmax(dim=-1)
        return list(zip(plan.logits_requests.tolist(), likeliest.tolist(), strict=True))
