"""A SelectionPlan as the arrays that are copied to the device, and the values of their pads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.selection_plan import SelectionPlan
from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits

Ints = NDArray[np.int64]

SPAN_ARRAYS = ("first_rows", "num_rows", "scored_rows", "modes", "counts", "thresholds", "choice_slots")
CANDIDATE_ARRAYS = ("candidate_blocks", "candidate_spans", "candidate_places")
CHOICE_ARRAYS = ("choice_places", "choice_spans", "choice_hi")


class SelectionArrays(NamedTuple):
    """int64 arrays, named and defined as in SelectionTensors."""

    first_rows: Ints
    num_rows: Ints
    scored_rows: Ints
    modes: Ints
    counts: Ints
    thresholds: Ints
    choice_slots: Ints
    candidate_blocks: Ints
    candidate_spans: Ints
    candidate_places: Ints
    choice_places: Ints
    choice_spans: Ints
    choice_hi: Ints

    @classmethod
    def of(cls, plan: SelectionPlan, limits: SelectionLimits) -> SelectionArrays:
        """The real entries of a step."""
        return cls(
            plan.first_rows,
            plan.num_rows,
            plan.scored_rows,
            plan.modes,
            plan.counts,
            plan.thresholds,
            plan.choice_slots,
            plan.candidate_blocks,
            plan.candidate_spans,
            plan.candidate_spans * limits.width + plan.candidate_numbers,
            plan.choice_spans * limits.most + plan.choice_ranks,
            plan.choice_spans,
            np.full(len(plan.choice_spans), limits.block_size, np.int64),
        )


def pad_values(spans: int, limits: SelectionLimits) -> dict[str, int]:
    """The pad of each array where there are so many spans, the last of which is no request's."""
    return {
        **dict.fromkeys(SelectionArrays._fields, 0),
        "choice_slots": limits.max_num_seqs,
        "candidate_spans": spans - 1,
        "candidate_places": spans * limits.width,
        "choice_places": (spans - 1) * limits.most,
        "choice_spans": spans - 1,
    }
