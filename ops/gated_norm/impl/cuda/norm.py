"""RMSNorm with a gate on CUDA: one Triton launch.

The kernel is imported where it is launched, because triton is optional.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.gated_norm.impl.reference import ReferenceGatedNorm
from vllm_gaudi_ucm.ops.registry import why_not_triton

LARGEST = 32_768
"""Elements of a group that one program keeps in registers."""
PROGRAM, THREAD = 1024, 8
"""Elements of a program if a group is smaller, and of a thread."""


class CudaGatedNorm(ReferenceGatedNorm):
    """Norms by a Triton kernel; if chosen by name, also on a CPU under Triton's interpreter."""

    devices: ClassVar[frozenset[str] | None] = frozenset({"cuda"})
    priority: ClassVar[int] = 20
    traceable: ClassVar[bool] = False

    def unavailable(self, device: str) -> str | None:
        return why_not_triton(device)

    def norm(self, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, *, gate_first: bool) -> Tensor:
        rows, groups, size = x.shape
        if x.dtype == torch.float64 or size > LARGEST or gate.stride(-1) != 1 or not len(x):
            return super().norm(x, gate, weight, epsilon, gate_first=gate_first)
        from vllm_gaudi_ucm.ops.gated_norm.impl.cuda.triton import rows as kernels

        x, out = x.contiguous(), torch.empty((rows, groups, size), dtype=x.dtype, device=x.device)
        block = 1 << (size - 1).bit_length()
        together = max(1, PROGRAM // block)
        kernels.norm_gated_rows[(-(-rows * groups // together),)](
            *(x, gate, weight.contiguous(), out, rows * groups, epsilon, gate.stride(0), gate.stride(1)),
            GROUPS=groups,
            SIZE=size,
            PART=gate.shape[2],
            EACH=weight.dim() == 2,
            GATE_FIRST=gate_first,
            ROWS=together,
            BLOCK=block,
            num_warps=min(32, max(1, together * block // (32 * THREAD))),
        )
        return out
