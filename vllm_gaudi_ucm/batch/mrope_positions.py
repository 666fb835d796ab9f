"""The row input of M-RoPE: a position on each of three axes, time, height and width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.row_input import RowInput

if TYPE_CHECKING:
    from torch import nn

    from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan

T = TypeVar("T")

NUM_AXES = 3

PLAIN = 0, 0
"""The entry of a request without pictures: all three positions are the index in the sequence."""


class MropePositions(RowInput):
    """Positions on each axis, which rotary layers read instead of the plain ones. Attention reads the plain ones.

    A model computes the positions of a prompt with pictures (`place`). Tokens behind it continue on all axes.

    kept: int32 [table rows, 2]: what is added to the index of tokens behind the prompt; tokens of a prompt that has
    positions of its own, otherwise 0.
    """

    name = "mrope_positions"
    columns = NUM_AXES

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        super().__init__(num_rows, max_model_len)
        self._prompts: dict[int, NDArray[np.int64]] = {}

    @classmethod
    def kept_shape(cls, max_model_len: int) -> tuple[int, ...]:
        return (len(PLAIN),)

    @classmethod
    def is_read_by(cls, model: nn.Module) -> bool:
        from vllm_gaudi_ucm.vllm_api.rotary import reads_axes

        return reads_axes(model)

    def remove(self, row: int) -> None:
        self.kept[row] = PLAIN
        self._prompts.pop(row, None)

    def place(self, row: int, positions: NDArray[np.int64], delta: int) -> None:
        """Sets the positions of a request.

        positions: int64 [axes, tokens of the prompt]. delta: is added to the index of each token behind the prompt.
        """
        self.remove(row)
        count = positions.shape[1]
        if delta == 0 and (positions == np.arange(count)).all():
            return
        self.kept[row] = delta, count
        self._prompts[row] = positions

    def of(self, plan: UnifiedPlan) -> NDArray[np.integer[Any]]:
        rows = plan.table_rows[plan.row_requests]
        found = np.repeat((plan.positions + self.kept[rows, 0])[None], NUM_AXES, axis=0)
        in_prompt = plan.positions < self.kept[rows, 1]
        for row in np.unique(rows[in_prompt]).tolist():
            chosen = in_prompt & (rows == row)
            found[:, chosen] = self._prompts[row][:, plan.positions[chosen]]
        return found

    @classmethod
    def kwargs(cls, values: T) -> dict[str, T]:
        return {"positions": values}
