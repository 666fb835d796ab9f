"""RMSNorm with a gate: validates, and calls the implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.gated_norm.implementation import GATED_NORMS
from vllm_gaudi_ucm.ops.registry import AUTO


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, *, gate_first: bool, implementation: str = AUTO
) -> Tensor:
    """Norms each vector of x, and multiplies by silu of the gate: before the norm if `gate_first`, and behind it
    otherwise.

    x: [rows, groups, size]; each group has a mean of squares of its own. gate: [rows, *, *], with groups * size
        elements for each row, whose order is the one of x. weight: [size] for every group, or [groups, size].

    Returns [rows, groups, size] in the dtype of x. Numbers in between are float32, or float64 for float64.
    Raises ValueError if shapes do not match (not while compiling).
    """
    if not torch.compiler.is_compiling():
        rows, groups, size = x.shape
        if gate.dim() != 3 or gate.shape[0] != rows or gate.shape[1] * gate.shape[2] != groups * size:
            raise ValueError(f"gated_norm: gate is {tuple(gate.shape)}, expected {rows} rows of {groups * size}")
        if tuple(weight.shape) not in ((size,), (groups, size)):
            raise ValueError(f"gated_norm: weight is {tuple(weight.shape)}, expected {(size,)} or {(groups, size)}")
    chosen = GATED_NORMS.choose(implementation, x.device.type)
    return chosen.norm(x, gate, weight, epsilon, gate_first=gate_first)
