"""RMSNorm: x -> weight * x / sqrt(mean(x^2) + epsilon), in one pass on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cpu.native.library import HALF_TYPES, is_half_rows, is_rows, native


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """The norm of x [..., size]; with a residual the norm of x + residual, and the sum is written to `residual`.

    weight: [size], or None for ones. residual: the shape and dtype of x; x may then be overwritten, too.
    Computed in the dtype of x; in half precision as in vLLM: the norm reads the sum before it is rounded, and is
    rounded before it is weighted.
    """
    kernels = None if torch.compiler.is_compiling() else native()
    if kernels is None or not _covered(x, weight, residual):
        if x.dtype in HALF_TYPES:
            return _in_half(x, weight, epsilon, residual)
        total = x if residual is None else residual.add_(x)
        return torch.rms_norm(total, (x.shape[-1],), weight, epsilon)
    out = x.new_empty(x.shape) if residual is None or not x.is_contiguous() else x
    is_half = x.dtype in HALF_TYPES
    norm = kernels.ucm_rms_norm_half if is_half else kernels.ucm_rms_norm
    norm(
        x.data_ptr(),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        None if weight is None else weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        epsilon,
        *((HALF_TYPES[x.dtype],) if is_half else ()),
    )
    return out


def _in_half(x: Tensor, weight: Tensor | None, epsilon: float, residual: Tensor | None) -> Tensor:
    total = x.float()
    if residual is not None:
        total = total + residual.float()
        residual.copy_(total)
    scaled = torch.rms_norm(total, (x.shape[-1],), None, epsilon).to(x.dtype)
    return scaled if weight is None else (scaled.to(weight.dtype) * weight).to(x.dtype)


def _covered(x: Tensor, weight: Tensor | None, residual: Tensor | None) -> bool:
    if not (is_rows(x) or is_half_rows(x)):
        return False
    if weight is not None and not (weight.dtype == x.dtype and weight.shape == x.shape[1:] and weight.is_contiguous()):
        return False
    if residual is None:
        return True
    is_alike = is_rows(residual) or is_half_rows(residual)
    return is_alike and residual.dtype == x.dtype and residual.shape == x.shape
