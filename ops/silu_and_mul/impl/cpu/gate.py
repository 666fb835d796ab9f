"""silu(x[..., :size]) * x[..., size:], in one pass on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from vllm_gaudi_ucm.ops.cpu.native.library import HALF_TYPES, is_half_rows, is_rows, native


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gates) * values: [..., size] in the dtype of x. x: [..., 2 * size], the gates first."""
    size = x.shape[-1] // 2
    kernels = None if torch.compiler.is_compiling() else native()
    is_half = is_half_rows(x)
    if kernels is None or not (is_half or is_rows(x)):
        return silu(x[..., :size]) * x[..., size:]
    out = x.new_empty((x.shape[0], size))
    if is_half:
        given = x.data_ptr(), x.stride(0), out.data_ptr(), x.shape[0], size
        kernels.ucm_silu_and_mul_half(*given, HALF_TYPES[x.dtype])
        return out
    kernels.ucm_silu_and_mul(x.data_ptr(), x.stride(0), out.data_ptr(), x.shape[0], size)
    return out
