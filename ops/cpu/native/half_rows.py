"""Rows of half precision to float32 and back, as native calls that a graph can hold."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cpu.native.library import HALF_TYPES, is_half_rows, native


def widen_rows(x: Tensor) -> Tensor:
    """float32 [rows, columns], exact. x: bfloat16 or float16 [rows, columns]; there may be gaps between rows."""
    kernels = native()
    if kernels is None or not is_half_rows(x):
        return x.float()
    wide = x.new_empty(x.shape, dtype=torch.float32)
    kernels.ucm_widen_rows(x.data_ptr(), x.stride(0), wide.data_ptr(), *x.shape, HALF_TYPES[x.dtype])
    return wide


def narrow_rows(values: Tensor, out: Tensor) -> Tensor:
    """Writes float32 values to `out`, each rounded to the nearest, ties to even; returns it. Both: [rows, columns]."""
    kernels = native()
    if kernels is None or not (is_half_rows(out) and values.is_contiguous() and values.dtype == torch.float32):
        return out.copy_(values)
    kernels.ucm_narrow_rows(values.data_ptr(), out.data_ptr(), out.stride(0), *out.shape, HALF_TYPES[out.dtype])
    return out
