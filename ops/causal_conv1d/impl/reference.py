"""Short convolutions in plain torch: a shifted copy of the rows for each tap, at static shapes on any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_gaudi_ucm.ops.causal_conv1d.implementation import ConvolutionImplementation
from vllm_gaudi_ucm.ops.narrow_floats import put
from vllm_gaudi_ucm.ops.state_rows import StateRows


class ReferenceConvolution(ConvolutionImplementation):
    """The reference: nothing is read on the host, so it may be captured and traced."""

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, step: StateRows, *, silu: bool
    ) -> Tensor:
        taps = weight.shape[1]
        wide = torch.promote_types(x.dtype, torch.float32)
        past = [x, *(_shifted(x, states, step, back) for back in range(1, taps))]
        weights = weight.to(wide).unbind(1)
        total = past[0].to(wide) * weights[-1]
        for back in range(1, taps):
            total = torch.addcmul(total, past[back].to(wide), weights[-1 - back])
        if bias is not None:
            total = total + bias.to(wide)
        if taps > 1 and len(step.kept_rows):
            # the state after a row ends with that row
            kept = [past[back].index_select(0, step.kept_rows) for back in reversed(range(taps - 1))]
            put(states, 0, step.kept_at, torch.stack(kept, 1).to(states.dtype))
        return (functional.silu(total) if silu else total).to(x.dtype)


def _shifted(x: Tensor, states: Tensor, step: StateRows, back: int) -> Tensor:
    """Returns the row that is `back` rows before each row of the same request, [rows, channels]."""
    shifted = torch.cat((x[:back], x[: max(len(x) - back, 0)]))
    length = states.shape[1]
    index = step.row_sources * length + (step.offsets + (length - back)).clamp(max=length - 1)
    from_state = states.flatten(0, 1).index_select(0, index).to(x.dtype)
    return torch.where((step.offsets >= back).unsqueeze(1), shifted, from_state)
