"""The gated delta rule over the rows of requests: validates, and calls the implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.gated_delta.implementation import GATED_DELTAS, DeltaRows
from vllm_gaudi_ucm.ops.registry import AUTO
from vllm_gaudi_ucm.ops.state_rows import StateRows


def gated_delta(
    rows: DeltaRows,
    states: Tensor,
    step: StateRows,
    *,
    normalise: bool = True,
    implementation: str = AUTO,
) -> Tensor:
    """S = exp(log_decay) S, S = S + k (beta * (v - S^T k))^T, then y = S^T q / sqrt(key_dim), for each head, row after
    row of a request.

    rows.q, rows.k: [rows, key_heads, key_dim]; value head h reads key head h // (heads // key_heads).
    rows.v: [rows, heads, value_dim]. rows.log_decay: [rows, heads], not positive. rows.beta: [rows, heads], 0 to 1.
    states: [slots, heads, key_dim, value_dim], written in place, as `step` says.
    normalise: divides q and k by their length, the root of (sum of squares + 1e-6), first. Longer keys than 1 may make
        states grow without bound.

    Returns [rows, heads, value_dim] in the dtype of v. Numbers in between are float32, or float64 for float64.
    Raises ValueError if shapes do not match (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _validate(rows, states, step)
    return GATED_DELTAS.choose(implementation, rows.v.device.type).scan(rows, states, step, normalise=normalise)


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, bias: Tensor, *, implementation: str = AUTO
) -> tuple[Tensor, Tensor]:
    """Returns `log_decay`, -exp(a_log) * softplus(a + bias), and `beta`, sigmoid(b), for `DeltaRows`.

    a, b: [rows, parts, heads / parts], as they are in the results of a projection. a_log, bias: [heads].
    Both results are float32, [rows, heads].
    """
    return GATED_DELTAS.choose(implementation, a.device.type).gates(a, b, a_log, bias)


def _validate(rows: DeltaRows, states: Tensor, step: StateRows) -> None:
    _, heads, key_dim, value_dim = states.shape
    count, key_heads = len(step.places), rows.k.shape[1]
    if heads % key_heads:
        raise ValueError(
            f"gated_delta: {heads} value heads and {key_heads} key heads, expected a multiple of the key heads"
        )
    wanted = {
        "q": (rows.q, (count, key_heads, key_dim)),
        "k": (rows.k, (count, key_heads, key_dim)),
        "v": (rows.v, (count, heads, value_dim)),
        "log_decay": (rows.log_decay, (count, heads)),
        "beta": (rows.beta, (count, heads)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"gated_delta: {name} is {tuple(tensor.shape)}, expected {shape}")
