"""Short convolutions over the rows of requests: validates, and calls the implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.causal_conv1d.implementation import CONVOLUTIONS
from vllm_gaudi_ucm.ops.registry import AUTO
from vllm_gaudi_ucm.ops.state_rows import StateRows


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    step: StateRows,
    *,
    silu: bool = False,
    implementation: str = AUTO,
) -> Tensor:
    """y[r, c] = bias[c] + sum over t of weight[c, t] * x[r - width + 1 + t, c], over the rows of r's request alone.

    Rows before the first one of a request in this step come from its state, its last width - 1 rows.

    x: [rows, channels]. weight: [channels, width], in the dtype of x or a wider one. bias: [channels].
    states: [slots, width - 1, channels], oldest row first; written in place, as `step` says. A row of a state is
        contiguous, so it is read and written as rows of x are. silu: y is y * sigmoid(y).

    Returns [rows, channels] in the dtype of x. Sums are float32, or float64 for float64.
    Raises ValueError if shapes do not match (not while compiling).
    """
    if not torch.compiler.is_compiling():
        channels, width = weight.shape
        wanted = {"x": (len(step.places), channels), "states": (len(states), width - 1, channels)}
        for name, tensor in (("x", x), ("states", states)):
            if tuple(tensor.shape) != wanted[name]:
                raise ValueError(f"causal_conv1d: {name} is {tuple(tensor.shape)}, expected {wanted[name]}")
        if bias is not None and tuple(bias.shape) != (channels,):
            raise ValueError(f"causal_conv1d: bias is {tuple(bias.shape)}, expected {(channels,)}")
    chosen = CONVOLUTIONS.choose(implementation, x.device.type)
    return chosen.convolve(x, weight, bias, states, step, silu=silu)
