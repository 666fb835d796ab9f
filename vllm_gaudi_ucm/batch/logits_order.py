"""The order of a step's logits: that of the sampler's slots, so that parameters and logits agree without a gather."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
from vllm_gaudi_ucm.batch.request_table import LiveRequest


def in_slot_order(
    plan: UnifiedPlan, members: Sequence[LiveRequest], sampled: Sequence[LiveRequest]
) -> tuple[UnifiedPlan, NDArray[np.int64]]:
    """The plan with its logits rows in the order of the sampler's slots, and these slots, int64 [logits].

    members: requests of the plan. sampled: those that the whole step samples, by slot.
    """
    slot_of = {request: slot for slot, request in enumerate(sampled)}
    yielding = (slot_of[members[index]] for index in plan.logits_requests.tolist())
    slots = np.fromiter(yielding, np.int64, len(plan.logits_requests))
    order = np.argsort(slots)
    requests, rows = plan.logits_requests[order], plan.logits_rows[order]
    return plan._replace(logits_requests=requests, logits_rows=rows), slots[order]
