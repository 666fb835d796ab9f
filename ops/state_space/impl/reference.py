"""State-space layers by definition, row after row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vllm_gaudi_ucm.ops.state_rows import StateRows, recur
from vllm_gaudi_ucm.ops.state_space.implementation import SpaceImplementation, SpaceRows
from vllm_gaudi_ucm.ops.state_space.recurrence import add_skip, update


class ReferenceSpace(SpaceImplementation):
    """The reference: nothing is read on the host, so it may be captured and traced."""

    def scan(self, rows: SpaceRows, a: Tensor, d: Tensor | None, states: Tensor, step: StateRows) -> Tensor:
        def one(state: Tensor, row: Sequence[Tensor]) -> Tensor:
            return update(state, SpaceRows(*row), a)

        return add_skip(recur(step, states, rows, one), rows.x, d).to(rows.x.dtype)
