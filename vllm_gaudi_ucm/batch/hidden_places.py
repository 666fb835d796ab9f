"""The row input of hidden states: where a row's hidden state is in the table for the draft head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.row_input import RowInput

if TYPE_CHECKING:
    from torch import nn

    from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan

T = TypeVar("T")

PASSED_STATES = "passed_states"
"""The attribute of a model that writes or reads the table."""

FIRST_PLACE = 1
"""Pads of the model and of the head write place 0, which only pads read."""


def num_places(max_num_batched_tokens: int, max_num_seqs: int, num_drafts: int) -> int:
    """Returns the places that the largest step needs: its rows, and the rows of the head's further passes."""
    return FIRST_PLACE + max_num_batched_tokens + max_num_seqs * num_drafts


class HiddenPlaces(RowInput):
    """Places of rows in the table of hidden states. The model writes the state of position p to its place, where the
    head's row of this position reads it. The head writes its own state one place further: its next pass, with a row at
    position p + 1, reads it there.

    kept: int32 [table rows], the place of position 0, which is negative if earlier steps computed the first positions.
    """

    name = "hidden_places"

    @classmethod
    def is_read_by(cls, model: nn.Module) -> bool:
        return PASSED_STATES in vars(model)

    @classmethod
    def kwargs(cls, values: T) -> dict[str, T]:
        return {}

    def begin_step(
        self,
        rows: NDArray[np.int64],
        num_computed: NDArray[np.int32],
        num_scheduled: NDArray[np.int32],
        num_drafts: int,
    ) -> None:
        """Gives each request of a step its places, one request after the other.

        rows: int64 [requests] of the request table. num_computed, num_scheduled: int32 [requests], tokens of each.
        num_drafts: of the head, for each request.
        """
        counts = num_scheduled.astype(np.int64) + num_drafts
        self.kept[rows] = FIRST_PLACE + np.cumsum(counts) - counts - num_computed

    def of(self, plan: UnifiedPlan) -> NDArray[np.integer[Any]]:
        return super().of(plan) + plan.positions
