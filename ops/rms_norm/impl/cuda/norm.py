"""RMSNorm on CUDA in Triton: one launch, with the addition of a residual before it.

The kernel is imported where it is launched, because triton is optional.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.registry import why_not_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 32_768  # elements that one program keeps in registers
# Elements of a program if a vector is shorter, and of a thread: one load of 16 bytes in half precision. Neither depends
# on the number of rows, so a row's sum has the same order in every batch.
PROGRAM, THREAD = 1024, 8


def can_norm(x: Tensor, weight: Tensor | None, residual: Tensor | None = None) -> bool:
    """True if `cuda_rms_norm` covers these tensors, on their device."""
    return (
        why_not_triton(x.device.type) is None
        and _is_covered(x)
        and 0 < x.shape[-1] <= LARGEST
        and (weight is None or (weight.shape == x.shape[-1:] and weight.is_contiguous()))
        and (residual is None or (_is_covered(residual) and residual.shape == x.shape and residual.dtype == x.dtype))
    )


def cuda_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    epsilon: float,
    residual: Tensor | None = None,
    *,
    variance_size: int | None = None,
    plus_one: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The norm of x [rows, size] or [rows, heads, size], or of x + residual; and that sum, None without a residual.

    weight: [size], or None for ones. plus_one: times 1 + weight. residual: the shape and dtype of x. There may be gaps
    between rows and heads. variance_size: leading elements that the mean square is taken of; None: all.
    in_place: with a residual, the norm is written to x and the sum to the residual.

    Computed in float32; each result is rounded once, and the norm reads the sum before it is rounded.
    `can_norm` must hold for the arguments.
    """
    from vllm_gaudi_ucm.ops.rms_norm.impl.cuda.triton import rows as kernels

    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    count = x.shape[0] * heads
    total = None
    if residual is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    elif in_place:
        out, total = x, residual
    else:
        out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if not count:
        return out, total
    block = 1 << (size - 1).bit_length()
    rows = max(1, PROGRAM // block)
    kernels.norm_rows[(-(-count // rows),)](
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        out,
        out if total is None else total,
        count,
        epsilon,
        *_strides(x),
        *_strides(x if residual is None else residual),
        *_strides(out),
        *_strides(out if total is None else total),
        HEADS=heads,
        SIZE=size,
        VARIANCE=size if variance_size is None else variance_size,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        PLUS_ONE=plus_one,
        ROWS=rows,
        BLOCK=block,
        num_warps=min(32, max(1, rows * block // (32 * THREAD))),
    )
    return out, total


def _is_covered(x: Tensor) -> bool:
    return x.dtype in DTYPES and x.dim() in (2, 3) and x.stride(-1) == 1


def _strides(x: Tensor) -> tuple[int, int]:
    """Elements from row to row, and from head to head."""
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0
