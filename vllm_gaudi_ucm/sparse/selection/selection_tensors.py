"""The choices of a step as tensors: what the layers of its forward read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.selection_plan import SelectionPlan
from vllm_gaudi_ucm.ops.block_selection.impl.native import NativeSelection, StepCandidates
from vllm_gaudi_ucm.ops.unified_attention.api import PreparedParts
from vllm_gaudi_ucm.ops.unified_attention.parts import SelectedPart
from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionLimits

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


class SelectionTensors(NamedTuple):
    """A SelectionPlan on the device, padded or not; every tensor is int64.

    first_rows, num_rows, scored_rows, modes, counts, thresholds, choice_slots: [spans]; pads have no rows, and a slot
        of nobody.
    candidate_blocks, candidate_spans, candidate_places: [candidates]; a place is span * width + logical block number,
        and spans * width for pads.
    choice_places: [selected] span * most + rank. choice_spans: [selected]. choice_hi: [selected] tokens of the block
        that are seen: all, or none for pads.
    max_rows: rows of a span at most. width: logical blocks of a request at most. most: ranks stored of a request.
    """

    first_rows: torch.Tensor
    num_rows: torch.Tensor
    scored_rows: torch.Tensor
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
    width: int
    most: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], limits: SelectionLimits) -> SelectionTensors:
        """tensors: by the names of SelectionArrays."""
        arrays = {name: tensors[name] for name in SelectionArrays._fields}
        return cls(**arrays, max_rows=limits.max_rows, width=limits.width, most=limits.most)

    @property
    def num_spans(self) -> int:
        return self.first_rows.shape[0]

    def chosen_part(self) -> SelectedPart:
        """The selected part of layers that choose; which blocks these are is each layer's own."""
        blocks = torch.zeros_like(self.choice_spans)
        return SelectedPart(blocks, self.choice_spans, self.choice_hi, self.first_rows, self.num_rows, self.max_rows)

    def candidates_part(self, block_size: int) -> SelectedPart:
        """The selected part of dense layers: every candidate."""
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
        """int64 [spans * width + 1] physical block of each place; 0 where no candidate is."""
        table = self.candidate_blocks.new_zeros(self.num_spans * self.width + 1)
        return table.index_copy_(0, self.candidate_places, self.candidate_blocks)


@dataclass
class LayerSelection:
    """What the layers of one forward hand on to each other.

    tensors: of the step. dense_parts: the step's parts for dense layers, where there are such layers.
    reused: whether every request uses its stored choice, so that nothing is scored.
    at_once: whether a layer's choice may be one native call, on a CPU and outside of graphs.
    chosen: int64 [selected] the blocks of the current layer; None: it is dense.
    """

    tensors: SelectionTensors
    dense_parts: PreparedParts | None = None
    reused: bool = False
    at_once: bool = False
    chosen: torch.Tensor | None = None
    block_table: torch.Tensor = field(init=False)
    native: NativeSelection | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        t = self.tensors
        self.block_table = t.block_table()
        if self.at_once:
            spans = t.first_rows, t.num_rows, t.modes, t.counts, t.thresholds, t.choice_slots
            candidates = t.candidate_blocks, t.candidate_spans, t.candidate_places
            choices = t.choice_places, t.choice_spans, t.choice_hi
            self.native = NativeSelection(
                StepCandidates(*candidates, *spans, *choices, self.block_table, t.width, t.most)
            )
