"""Known workloads whose operators `gaudi-ucm op-cost` counts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan, plan_batch


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
        return plan_batch(BatchInput(computed, scheduled, computed + scheduled, (tables,)), block_size)


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
