"""The cached contexts of a step, divided into what several rows use and what one row uses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.common_prefix import common_prefix, with_common_prefix
from vllm_gaudi_ucm.batch.context_pairs import context_pairs, shared_pairs
from vllm_gaudi_ucm.batch.shared_plan import SharedPlan, plan_shared
from vllm_gaudi_ucm.batch.unique_plan import UniquePlan, plan_unique

CachedParts = tuple[SharedPlan | None, UniquePlan | None]


class CachedContexts(NamedTuple):
    """What decides the division; requests in flat order.

    context: int64 [requests] cached tokens that the rows of a request see.
    requests: int64 [requests] row of `block_tables` of each request.
    block_tables: int32 [requests, width] physical block ids.
    query_start: int64 [requests + 1] first row of each request.
    num_single: requests [0, num_single) have one row, the others more.
    block_size: tokens per cache block.
    left_out: bool [requests, width] blocks of `block_tables` that are attended by choice (or not at all), if any.
    """

    context: NDArray[np.int64]
    requests: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    query_start: NDArray[np.int64]
    num_single: int
    block_size: int
    left_out: NDArray[np.bool_] | None = None

    def plan(self) -> CachedParts:
        return self._plan_behind_prefix() or self._plan_all()

    def _plan_all(self) -> CachedParts:
        pairs = context_pairs(self.context, self.requests, self.block_tables, self.block_size, left_out=self.left_out)
        shared = shared_pairs(pairs, self.num_single)
        return plan_shared(pairs, shared, self.query_start), plan_unique(pairs, shared)

    def _plan_behind_prefix(self) -> CachedParts | None:
        """Blocks at the head of all contexts are shared by all rows: they take no part in the search for shared ones.

        None if there is no such block, or if all rows use others as well, which belong to the same group.
        """
        if len(self.requests) < 2 or self.left_out is not None:
            return None
        prefix = common_prefix(self.context, self.block_tables, self.block_size)
        if not len(prefix):
            return None
        pairs = context_pairs(self.context, self.requests, self.block_tables, self.block_size, len(prefix))
        shared = shared_pairs(pairs, self.num_single)
        rest = plan_shared(pairs, shared, self.query_start, room=len(prefix))
        whole = with_common_prefix(prefix, rest, len(self.requests), int(self.query_start[-1]), self.block_size)
        return None if whole is None else (whole, plan_unique(pairs, shared))
