"""Plans of steps whose requests have given rows of the request table."""

from __future__ import annotations

import numpy as np

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan, plan_batch


def plan(computed: list[int], scheduled: list[int], rows: list[int]) -> UnifiedPlan:
    """The plan of a step of requests with these rows of the request table."""
    known = np.array(computed, np.int32) + np.array(scheduled, np.int32)
    tables = (np.arange(len(rows) * 4, dtype=np.int32).reshape(len(rows), 4) + 1,)
    batch = BatchInput(np.array(computed, np.int32), np.array(scheduled, np.int32), known, tables, np.array(rows))
    return plan_batch(batch, 16)
