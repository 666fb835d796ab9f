"""Short convolutions on CUDA: one Triton launch, and one copy of the states that are kept.

The kernel is imported where it is launched, because triton is optional.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.causal_conv1d.impl.reference import ReferenceConvolution
from vllm_gaudi_ucm.ops.registry import why_not_triton
from vllm_gaudi_ucm.ops.state_rows import StateRows, rows_together

ELEMENTS, ROWS, WARPS = 4096, 16, 4
"""Elements of a program, its rows in a step of many, and its warps."""
MANY = 128
"""A step with more rows has enough for all multiprocessors in blocks of rows."""


class CudaConvolution(ReferenceConvolution):
    """Convolutions by a Triton kernel; if chosen by name, also on a CPU under Triton's interpreter."""

    devices: ClassVar[frozenset[str] | None] = frozenset({"cuda"})
    priority: ClassVar[int] = 20
    traceable: ClassVar[bool] = False

    def unavailable(self, device: str) -> str | None:
        return why_not_triton(device)

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, step: StateRows, *, silu: bool
    ) -> Tensor:
        channels, taps = weight.shape
        if torch.float64 in (x.dtype, weight.dtype) or taps == 1 or not len(x):
            return super().convolve(x, weight, bias, states, step, silu=silu)
        from vllm_gaudi_ucm.ops.causal_conv1d.impl.cuda.triton import rows as kernels

        x, weight = rows_together(x), weight.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kept = torch.empty((len(step.kept_rows), *states.shape[1:]), dtype=states.dtype, device=states.device)
        # few rows in smaller blocks, which are more
        row_block = ROWS if len(x) > MANY else 1
        row_blocks = -(-len(x) // row_block)
        block = min(ELEMENTS // ROWS if row_block > 1 else ELEMENTS // 4, 1 << (channels - 1).bit_length())
        kernels.convolve_rows[((row_blocks + len(kept)) * -(-channels // block),)](
            *(x, weight, weight if bias is None else bias, states, out, kept),
            *(step.offsets, step.row_sources, step.kept_rows, len(x), row_blocks, x.stride(0)),
            CHANNELS=channels,
            TAPS=taps,
            BIAS=bias is not None,
            SILU=silu,
            ROWS=row_block,
            BLOCK=block,
            num_warps=WARPS,
        )
        states.index_copy_(0, step.kept_at, kept)
        return out
