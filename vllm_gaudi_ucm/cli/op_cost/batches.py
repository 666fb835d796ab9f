"""Batches whose attention `gaudi-ucm op-cost` counts: the workloads that attention kernels are compared on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan, plan_batch
from vllm_gaudi_ucm.graphs.cost.model_figures import ModelFigures
from vllm_gaudi_ucm.graphs.operator_cost.stream_cost import Work


class Batch(NamedTuple):
    """Requests as (computed, scheduled) tokens; the first `prefix` tokens are in blocks of all of them."""

    name: str
    text: str
    requests: list[tuple[int, int]]
    prefix: int = 0

    def plan(self, block_size: int) -> UnifiedPlan:
        """The step, as the runner would plan it."""
        ends = [sum(request) for request in self.requests]
        tables = np.zeros((len(ends), -(-max(ends) // block_size)), np.int32)
        shared = self.prefix // block_size
        tables[:, :shared] = 1 + np.arange(shared)
        free = 1 + shared
        for table, end in zip(tables, ends, strict=True):
            own = -(-end // block_size) - shared
            table[shared : shared + own] = free + np.arange(own)
            free += own
        computed, scheduled = np.array(self.requests, np.int32).T
        return plan_batch(BatchInput(computed, scheduled, computed + scheduled, tables), block_size)


BATCHES = {
    batch.name: batch
    for batch in (
        Batch("decode", "64 requests at 8192", [(8191, 1)] * 64),
        Batch("shared-prefix", "64 decodes, 8192 shared and 512 own", [(8703, 1)] * 64, 8192),
        Batch("mixed", "a prompt of 2048 and 32 decodes at 4096", [(4095, 1)] * 32 + [(0, 2048)]),
        Batch("prefill", "a prompt of 8192", [(0, 8192)]),
        Batch("packed-prefill", "16 prompts of 512", [(0, 512)] * 16),
    )
}


def least_work(plan: UnifiedPlan, model: ModelFigures) -> Work:
    """What no implementation can do without, in one layer.

    Each (row, token) pair is multiplied twice; each token of the cache, each new token and each row is read, and each
    result is written, once.
    """
    new = np.diff(plan.query_start)
    new = new[new > 1]
    pairs = int((new * (new + 1) // 2).sum())
    cached = 0
    if plan.unique is not None:
        pairs += int(plan.unique.hi.sum())
        cached += int(plan.unique.hi.sum())
    if plan.shared is not None:
        pairs += int(plan.shared.hi[plan.row_requests].sum())
        cached += int(plan.shared.hi.max(0).sum())
    return _work(model, plan.num_rows, pairs, cached + int(new.sum()))


def full_work(phase: str, rows: int, shared: int, unique: int, block_size: int, model: ModelFigures) -> Work:
    """The same of a step that fills a bucket: one prompt, and every row sees every shared block."""
    causal = rows * (rows + 1) // 2 if "c" in phase else 0
    pairs = causal + (rows * shared + unique) * block_size
    return _work(model, rows, pairs, (shared + unique) * block_size + (rows if causal else 0))


def _work(model: ModelFigures, rows: int, pairs: int, tokens: int) -> Work:
    flops = 4.0 * model.heads * model.head_dim * pairs
    vectors = 2 * rows * model.heads + 2 * tokens * model.kv_heads
    return Work(flops, float(vectors * model.head_dim * model.dtype_bytes))
