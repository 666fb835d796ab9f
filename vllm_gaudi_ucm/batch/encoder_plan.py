"""Plans steps of encoders: rows see all tokens of their request, which are all new, and nothing is cached."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, GroupPlan, UnifiedPlan
from vllm_gaudi_ucm.batch.causal_plan import CausalPlan

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.group_planner import Planned
    from vllm_gaudi_ucm.batch.selection_plan import SelectionInput


class BothWaysPlan(CausalPlan):
    """A causal plan without the order. The slices of a request have all of its rows as keys."""

    __slots__ = ()

    def pairs(self) -> int:
        """Returns the (row, row) pairs: each row of a request's n rows sees n of them."""
        return int((np.bincount(self.groups).astype(np.int64) ** 2).sum())


class EncoderPlanner:
    """Plans steps of whole prompts; see GroupPlanner and SteadyPlanner.

    Args:
        causal_slice: query rows per slice.
    """

    def __init__(self, causal_slice: int = 512) -> None:
        self._causal_slice = causal_slice

    @property
    def steady(self) -> EncoderPlanner:
        """Returns the planner of the first group, which plans the rows, too."""
        return self

    def plan(
        self,
        batch: BatchInput,
        step: UnifiedPlan | SelectionInput | None = None,
        planned: Planned | None = None,
    ) -> UnifiedPlan:
        """Returns the plan of a step. Requests of the same length are next to each other, and share calls.

        Raises:
            ValueError: a prompt is not computed as a whole; vLLM's scheduler never divides prompts of encoders.
        """
        if step is not None:
            raise ValueError("EncoderPlanner: found blocks to choose from, expected none: an encoder caches nothing")
        if batch.num_computed.any() or (batch.num_scheduled != batch.num_tokens).any():
            raise ValueError(
                "EncoderPlanner: found a part of a prompt, expected whole prompts; start without "
                "--enable-chunked-prefill and --enable-prefix-caching"
            )
        requests = batch.num_scheduled.argsort(kind="stable")
        lengths = batch.num_scheduled[requests].astype(np.int64)
        start = np.zeros(len(requests) + 1, np.int64)
        lengths.cumsum(out=start[1:])
        rows = np.arange(len(requests)).repeat(lengths)
        causal = BothWaysPlan(rows.astype(np.int32), list(self._slices(start)))
        return UnifiedPlan(
            requests=requests,
            query_start=start,
            table_rows=requests if batch.table_rows is None else batch.table_rows[requests],
            row_requests=rows,
            positions=np.arange(len(rows)) - start[:-1].repeat(lengths),
            num_single=0,
            logits_requests=requests,
            logits_rows=start[1:] - 1,
            # no layer writes to a slot; another one than a pad's says that a row is a request's
            groups=(GroupPlan(np.ones(len(rows), np.int64), causal, None, None),),
        )

    def _slices(self, start: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
        step = self._causal_slice
        bounds = pairwise(start.tolist())
        return [(lo, min(lo + step, stop), first, stop) for first, stop in bounds for lo in range(first, stop, step)]
