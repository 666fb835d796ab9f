"""The gated delta rule by definition, row after row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.gated_delta.implementation import DeltaImplementation, DeltaRows
from vllm_gaudi_ucm.ops.gated_delta.recurrence import scaled, update
from vllm_gaudi_ucm.ops.state_rows import StateRows, recur


class ReferenceDelta(DeltaImplementation):
    """The reference: nothing is read on the host, so it may be captured and traced."""

    def scan(self, rows: DeltaRows, states: Tensor, step: StateRows, *, normalise: bool) -> Tensor:
        wide = torch.promote_types(rows.v.dtype, torch.promote_types(states.dtype, torch.float32))

        def one(state: Tensor, row: Sequence[Tensor]) -> Tensor:
            return update(state, DeltaRows(*row))

        return recur(step, states, scaled(rows, wide, normalise=normalise), one).to(rows.v.dtype)
