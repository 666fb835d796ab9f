"""RMSNorm on Gaudi: one fused operator, or torch's operators in float32, as in vLLM's own forward.

Traceable, and writes no tensor in place: a written input of a compiled region is copied at the region's end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FUSED_DTYPES = (torch.bfloat16, torch.float32)
# `hpu::rms_norm`: (x [1, rows, size], weight, epsilon) -> (norm, 1 / root mean square)
FusedRmsNorm = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def gaudi_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    epsilon: float,
    residual: Tensor | None = None,
    *,
    variance_size: int | None = None,
    fused: FusedRmsNorm | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The norm of x [..., size], or of x + residual, in the dtype of x; and that sum, None without a residual.

    weight: [size], or None for ones. residual: the shape of x. variance_size: leading elements that the mean square is
    taken of; None: all. fused: the operator of Gaudi's software, used if it covers the case.

    The fused operator reads the sum as it is returned, rounded to the dtype of x; torch's form reads it in float32.
    """
    if fused is None or variance_size is not None or weight is None or not _covered(x, weight):
        return _in_float32(x, weight, epsilon, residual, variance_size)
    total = None if residual is None else x + residual
    # the operator takes three dimensions; `view` fails on tensors that are not contiguous
    rows = (x if total is None else total).reshape(1, -1, x.shape[-1])
    return fused(rows, weight, epsilon)[0].reshape(x.shape), total


def _covered(x: Tensor, weight: Tensor) -> bool:
    return x.dtype in FUSED_DTYPES and weight.dtype == x.dtype


def _in_float32(
    x: Tensor, weight: Tensor | None, epsilon: float, residual: Tensor | None, variance_size: int | None
) -> tuple[Tensor, Tensor | None]:
    wide = x.float()
    total = None
    if residual is not None:
        wide = wide + residual.float()
        total = wide.to(x.dtype)
    measured = wide if variance_size is None else wide[..., :variance_size]
    normal = wide * torch.rsqrt(measured.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        normal = normal.to(weight.dtype) * weight
    return normal.to(x.dtype), total
