"""The gated delta rule by definition, row after row."""

from __future__ import annotations

from torch import Tensor

from vllm_gaudi_ucm.ops.gated_delta.implementation import DeltaImplementation, DeltaRows
from vllm_gaudi_ucm.ops.gated_delta.recurrence import scaled, update
from vllm_gaudi_ucm.ops.state_rows import StateRows, recur, wide_dtype


class ReferenceDelta(DeltaImplementation):
    """The reference: nothing is read on the host, so it may be captured and traced."""

    def scan(self, rows: DeltaRows, states: Tensor, step: StateRows, *, normalise: bool) -> Tensor:
        inputs = scaled(rows, wide_dtype(states, rows.v), normalise=normalise)
        return recur(step, states, inputs, update).to(rows.v.dtype)
