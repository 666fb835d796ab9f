"""A step before it is copied to the device: its plan, the model's inputs for each row, and the blocks to summarise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan

NO_BLOCKS: NDArray[np.int64] = np.zeros(0, np.int64)


class PlannedStep(NamedTuple):
    """All decisions of the host for a step.

    inputs: the arrays of each `RowInput`, by its name.
    summaries: int64 [n] blocks to be summarised once the step's keys and values are written.
    """

    plan: UnifiedPlan
    inputs: Mapping[str, NDArray[np.integer[Any]]]
    summaries: NDArray[np.int64] = NO_BLOCKS

    @classmethod
    def of_tokens(
        cls,
        plan: UnifiedPlan,
        token_ids: NDArray[np.integer[Any]],
        summaries: NDArray[np.int64] = NO_BLOCKS,
    ) -> PlannedStep:
        """Returns a step whose rows have only token ids and positions."""
        return cls(plan, {"token_ids": token_ids, "positions": plan.positions}, summaries)
