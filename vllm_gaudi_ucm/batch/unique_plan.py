"""Cached blocks that exactly one row uses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.context_pairs import ContextPairs, SharedPairs


class UniquePlan(NamedTuple):
    """Cached blocks that exactly one row uses; that row is always a single row."""

    blocks: NDArray[np.int64]
    rows: NDArray[np.int64]
    lo: NDArray[np.int32]
    hi: NDArray[np.int32]


def plan_unique(pairs: ContextPairs, shared: SharedPairs) -> UniquePlan | None:
    """The pairs that are not shared, in the order of the pairs."""
    if len(shared.pair) == len(pairs.block):
        return None
    if len(shared.pair):
        unique = np.ones(len(pairs.block), np.bool_)
        unique[shared.pair] = False
        pairs = pairs.take(unique.nonzero()[0])
    # a single row is the only row of its request and single rows come first: its row is its request's flat position
    return UniquePlan(pairs.block.astype(np.int64), pairs.request, np.zeros(len(pairs.hi), np.int32), pairs.hi)
