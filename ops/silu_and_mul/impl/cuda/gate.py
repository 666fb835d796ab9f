"""Gated activations on CUDA in Triton: one launch.

The kernel is imported where it is launched, because triton is optional.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.registry import why_not_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL, LARGE = (1024, 4), (4096, 8)  # elements of a program, and the program's warps
MANY = 1 << 22  # elements from which programs are large: all multiprocessors then have several

Form = Literal["silu", "gelu", "gelu_tanh"]
"""The gate function: x sigmoid(x); x times the normal distribution's cumulative function; or its tanh form."""


def can_gate(x: Tensor) -> bool:
    """True if `cuda_gate` covers this tensor, on its device."""
    return (
        why_not_triton(x.device.type) is None
        and x.dtype in DTYPES
        and x.shape[-1] > 0
        and x.shape[-1] % 2 == 0
        and (x.is_contiguous() if x.dim() != 2 else x.stride(-1) == 1)
    )


def cuda_gate(x: Tensor, form: Form = "silu") -> Tensor:
    """form(gates) * values: [..., size] in the dtype of x. x: [..., 2 * size], the gates first.

    Two dimensions may have gaps between rows. Computed in float32 and rounded once. `can_gate` must hold for x.
    """
    from vllm_gaudi_ucm.ops.silu_and_mul.impl.cuda.triton import gates as kernels

    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    block, warps = LARGE if out.numel() >= MANY else SMALL
    programs = out.numel() // size * -(-size // block)
    kernels.gate_rows[(programs,)](
        x, out, x.stride(-2) if x.dim() > 1 else 0, SIZE=size, FORM=form, BLOCK=block, num_warps=warps
    )
    return out
