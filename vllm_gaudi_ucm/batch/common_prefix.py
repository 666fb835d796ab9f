"""Leading blocks that all requests of a step use, as behind a system prompt: found by comparing columns, unsorted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.shared_plan import SharedPlan


def common_prefix(context: NDArray[np.int64], block_tables: NDArray[np.int32], block_size: int) -> NDArray[np.int32]:
    """Physical ids of the leading blocks that all requests see in full.

    Args:
        context: [requests] cached tokens that the rows of a request see, in any order; one request at least.
        block_tables: [requests, width] physical block ids.
        block_size: tokens per cache block.
    """
    if block_tables.item(0, 0) != block_tables.item(
        len(context) - 1, 0
    ):  # most batches without a common prefix end here
        return block_tables[0, :0]
    leading = block_tables[:, : int(context.min()) // block_size]
    same = (leading == leading[0]).all(axis=0)
    return leading[0, : len(same) if same.all() else int(same.argmin())]


def with_common_prefix(
    prefix: NDArray[np.int32], rest: SharedPlan | None, num_requests: int, num_rows: int, block_size: int
) -> SharedPlan | None:
    """The plan of the other shared blocks with a first group of all rows; None if `rest` has such a group itself.

    rest: with room for the prefix, which is written there: with many requests of many blocks a copy costs more than
        all the rest of planning.
    """
    count = len(prefix)
    if rest is None:
        hi = np.zeros((num_requests, count), np.int32)
        rest = SharedPlan(np.zeros(count, np.int64), np.zeros(hi.shape, np.int32), hi, [])
    elif any(len(rows) == num_rows for rows, _, _ in rest.groups):
        return None
    rest.blocks[:count] = prefix
    rest.hi[:, :count] = block_size
    return rest._replace(groups=[(np.arange(num_rows), 0, count), *rest.groups])
