"""The choices of a step as tensors, which the layers of its forward read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from vllm_gaudi_ucm.batch.selection_plan import SelectionPlan
from vllm_gaudi_ucm.ops.unified_attention.parts import SelectedPart
from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits

SPAN_ARRAYS = (
    *("first_rows", "num_rows", "scored_rows", "ranked_rows", "row_steps"),
    *("modes", "counts", "thresholds", "choice_slots"),
)
CANDIDATE_ARRAYS = ("candidate_blocks", "candidate_spans", "candidate_places")
CHOICE_ARRAYS = ("choice_places", "choice_spans", "choice_hi")


def pad_values(spans: int, limits: SelectionLimits) -> dict[str, int]:
    """Returns the pad of each array. spans: how many there are; the last one belongs to no request."""
    return {
        **dict.fromkeys(SelectionPlan._fields, 0),
        "row_steps": 1,
        "choice_slots": limits.max_num_seqs,
        "candidate_spans": spans - 1,
        "candidate_places": spans * limits.width,
        "choice_places": (spans - 1) * limits.most,
        "choice_spans": spans - 1,
    }


class SelectionTensors(NamedTuple):
    """A SelectionPlan on the device, padded or not; every tensor is int64.

    first_rows, num_rows, scored_rows, ranked_rows, row_steps, modes, counts, thresholds, choice_slots: [spans]; pads
        have no rows, and a slot of no request.
    candidate_blocks, candidate_spans, candidate_places: [candidates]; a place is span * width + logical block number,
        and spans * width for pads.
    choice_places: [selected] span * most + rank. choice_spans: [selected]. choice_hi: [selected] tokens of the block
        that are seen: all, or none for pads.
    max_rows: the most rows of a span. most_scored: the most that score its candidates. width: the most logical blocks
        of a request. most: ranks stored of a request.
    """

    first_rows: torch.Tensor
    num_rows: torch.Tensor
    scored_rows: torch.Tensor
    ranked_rows: torch.Tensor
    row_steps: torch.Tensor
    modes: torch.Tensor
    counts: torch.Tensor
    thresholds: torch.Tensor
    choice_slots: torch.Tensor
    candidate_blocks: torch.Tensor
    candidate_spans: torch.Tensor
    candidate_places: torch.Tensor
    choice_places: torch.Tensor
    choice_spans: torch.Tensor
    choice_hi: torch.Tensor
    max_rows: int
    most_scored: int
    width: int
    most: int

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], limits: SelectionLimits) -> SelectionTensors:
        """Makes the tensors. tensors: by the names of SelectionPlan."""
        arrays = {name: tensors[name] for name in SelectionPlan._fields}
        rows, scored = limits.max_rows, limits.scored_rows
        return cls(**arrays, max_rows=rows, most_scored=scored, width=limits.width, most=limits.most)

    @property
    def num_spans(self) -> int:
        return self.first_rows.shape[0]

    def scored(self) -> tuple[SelectionTensors, torch.Tensor | None]:
        """Returns the same choices for the rows that score blocks, and int64 [spans * most_scored], these rows; None if
        all rows of all spans do.
        """
        if self.most_scored == self.max_rows:
            return self, None
        last = (self.num_rows - 1).clamp_min(0)
        lane = torch.arange(self.most_scored, device=last.device)
        steps = torch.minimum(lane * self.row_steps[:, None], last[:, None])
        begins = torch.arange(self.num_spans, device=last.device) * self.most_scored
        counts = (
            torch.div(rows + self.row_steps - 1, self.row_steps, rounding_mode="floor")
            for rows in (self.num_rows, self.ranked_rows)
        )
        num_rows, ranked = (count.clamp_max(self.most_scored) for count in counts)
        tensors = self._replace(first_rows=begins, num_rows=num_rows, ranked_rows=ranked, max_rows=self.most_scored)
        return tensors, (self.first_rows[:, None] + steps).flatten()

    def chosen_part(self) -> SelectedPart:
        """Returns the selected part of layers that choose; each layer fills in its own blocks."""
        blocks = torch.zeros_like(self.choice_spans)
        return SelectedPart(blocks, self.choice_spans, self.choice_hi, self.first_rows, self.num_rows, self.max_rows)

    def candidates_part(self, block_size: int) -> SelectedPart:
        """Returns the selected part of dense layers: every candidate."""
        is_real = self.candidate_places < self.num_spans * self.width
        return SelectedPart(
            self.candidate_blocks,
            self.candidate_spans,
            is_real * block_size,
            self.first_rows,
            self.num_rows,
            self.max_rows,
        )

    def block_table(self) -> torch.Tensor:
        """Returns int64 [spans * width + 1] physical block of each place; 0 without a candidate."""
        table = self.candidate_blocks.new_zeros(self.num_spans * self.width + 1)
        return table.index_copy_(0, self.candidate_places, self.candidate_blocks)
