"""The rule of `plan_batch` in plain numpy: whole-array operations, the obvious function for each task, without tuning.

It answers with the planner's types and shares none of its code. Shared blocks are in another order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, GroupPlan, UnifiedPlan
from vllm_gaudi_ucm.batch.causal_plan import CausalPlan
from vllm_gaudi_ucm.batch.sharing import SharedPlan, UniquePlan


def plan_plainly(batch: BatchInput, block_size: int, causal_slice: int = 512) -> UnifiedPlan:
    """Arguments and meaning of the result as for `plan_batch`."""
    is_single = batch.num_scheduled == 1
    requests = np.concatenate([np.flatnonzero(is_single), np.flatnonzero(~is_single)])
    new = batch.num_scheduled[requests].astype(np.int64)
    computed = batch.num_computed[requests].astype(np.int64)
    tables = batch.block_tables[requests].astype(np.int64)
    query_start = np.concatenate([[0], np.cumsum(new)])
    row_requests = np.repeat(np.arange(len(requests)), new)
    positions = np.arange(query_start[-1]) - query_start[row_requests] + computed[row_requests]
    slots = tables[row_requests, positions // block_size] * block_size + positions % block_size

    context = np.where(new == 1, computed + 1, computed)
    hi = np.clip(context[:, None] - np.arange(tables.shape[1]) * block_size, 0, block_size).astype(np.int32)
    users, columns = np.nonzero(hi)
    blocks, hi = tables[users, columns], hi[users, columns]
    _, which, rows_of_block = np.unique(blocks, return_inverse=True, return_counts=True)
    shared = (rows_of_block[which] > 1) | (new[users] > 1)
    unique = UniquePlan(blocks[~shared], users[~shared], np.zeros_like(hi[~shared]), hi[~shared])
    yields = computed + new >= batch.num_tokens[requests]
    return UnifiedPlan(
        requests=requests,
        query_start=query_start,
        table_rows=requests,
        row_requests=row_requests,
        positions=positions,
        num_single=int(is_single.sum()),
        logits_requests=requests[yields],
        logits_rows=query_start[1:][yields] - 1,
        groups=(
            GroupPlan(
                slots,
                _causal(new, query_start, causal_slice),
                _shared(users[shared], blocks[shared], hi[shared], query_start) if shared.any() else None,
                unique if len(unique.blocks) else None,
            ),
        ),
    )


def _causal(new: NDArray[np.int64], query_start: NDArray[np.int64], causal_slice: int) -> CausalPlan | None:
    if not (new > 1).any():
        return None
    groups = np.repeat(np.where(new > 1, np.arange(len(new)), -1), new).astype(np.int32)
    slices = []
    for request in np.flatnonzero(new > 1):
        start, stop = int(query_start[request]), int(query_start[request + 1])
        for lo in range(start, stop, causal_slice):
            slices.append((lo, min(lo + causal_slice, stop), start, min(lo + causal_slice, stop)))
    return CausalPlan(groups, slices)


def _shared(
    users: NDArray[np.int64], pair_blocks: NDArray[np.int64], pair_hi: NDArray[np.int32], query_start: NDArray[np.int64]
) -> SharedPlan:
    blocks, column = np.unique(pair_blocks, return_inverse=True)
    hi = np.zeros((len(query_start) - 1, len(blocks)), np.int32)
    hi[users, column] = pair_hi
    _, group = np.unique(hi > 0, axis=1, return_inverse=True)
    order = np.argsort(group, kind="stable")
    groups = []
    for number in range(group.max() + 1):
        lo, stop = np.searchsorted(group[order], [number, number + 1])
        who = np.flatnonzero(hi[:, order[lo]])
        rows = np.concatenate([np.arange(query_start[user], query_start[user + 1]) for user in who])
        groups.append((rows, int(lo), int(stop)))
    return SharedPlan(blocks[order], np.zeros_like(hi), hi[:, order], groups)
