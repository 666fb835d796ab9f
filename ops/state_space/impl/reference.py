"""State-space layers by definition, row after row."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from vllm_gaudi_ucm.ops.state_rows import StateRows, recur
from vllm_gaudi_ucm.ops.state_space.implementation import SpaceImplementation, SpaceRows
from vllm_gaudi_ucm.ops.state_space.recurrence import add_skip, update


class ReferenceSpace(SpaceImplementation):
    """The reference: nothing is read on the host, so it may be captured and traced."""

    def scan(self, rows: SpaceRows, a: Tensor, d: Tensor | None, states: Tensor, step: StateRows) -> Tensor:
        return add_skip(recur(step, states, rows, partial(update, a=a)), rows.x, d).to(rows.x.dtype)
