"""RMSNorm: x -> weight * x / sqrt(mean(x^2) + epsilon), in one pass on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.native.library import is_rows, native


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """The norm of x [..., size]; with a residual the norm of x + residual, and the sum is written to `residual`.

    weight: [size], or None for ones. residual: as x; with a residual x may be overwritten, too.
    Computed in the dtype of x.
    """
    kernels = None if torch.compiler.is_compiling() else native()
    if kernels is None or not _covered(x, weight, residual):
        total = x if residual is None else residual.add_(x)
        return torch.rms_norm(total, (x.shape[-1],), weight, epsilon)
    out = x.new_empty(x.shape) if residual is None or not x.is_contiguous() else x
    kernels.ucm_rms_norm(
        x.data_ptr(),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        None if weight is None else weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        epsilon,
    )
    return out


def _covered(x: Tensor, weight: Tensor | None, residual: Tensor | None) -> bool:
    if not is_rows(x):
        return False
    if weight is not None and not (weight.dtype == x.dtype and weight.shape == x.shape[1:] and weight.is_contiguous()):
        return False
    return residual is None or (is_rows(residual) and residual.shape == x.shape)
