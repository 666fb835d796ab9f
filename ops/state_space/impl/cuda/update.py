"""State-space layers on CUDA: decodes in one Triton launch, and prompts in another.

Kernels are imported where they are launched, because triton is optional.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cuda.state_tiles import are_multiplied
from vllm_gaudi_ucm.ops.registry import why_not_triton
from vllm_gaudi_ucm.ops.state_rows import StateRows, rows_together
from vllm_gaudi_ucm.ops.state_space.impl.cuda.tiles import MOST_STATE, scan_prompts
from vllm_gaudi_ucm.ops.state_space.impl.tiled import TiledSpace
from vllm_gaudi_ucm.ops.state_space.implementation import SpaceRows

STATE, WARPS = 4096, 4  # elements of a state that a program keeps in registers, and its warps
STEPS = 256  # time steps of a program


class CudaSpace(TiledSpace):
    """By Triton kernels; if chosen by name, also on a CPU under Triton's interpreter. Prompts with larger states, or
    in another dtype than bfloat16, take torch's products.
    """

    devices: ClassVar[frozenset[str] | None] = frozenset({"cuda"})
    priority: ClassVar[int] = 20
    traceable: ClassVar[bool] = False

    def unavailable(self, device: str) -> str | None:
        return why_not_triton(device)

    def scan(self, rows: SpaceRows, a: Tensor, d: Tensor | None, states: Tensor, step: StateRows) -> Tensor:
        if torch.float64 in (rows.x.dtype, states.dtype):
            return super().scan(rows, a, d, states, step)
        if step.tile_rows.numel() and (states.shape[-1] > MOST_STATE or not are_multiplied(rows.x.dtype)):
            # results of requests with few rows are written over
            found = super().scan(rows, a, d, states, step._replace(few_rows=step.few_rows[:0]))
        else:
            # pads of a step have rows, too
            found = torch.zeros(rows.x.shape, dtype=rows.x.dtype, device=rows.x.device)
            if step.tile_rows.numel():
                scan_prompts(rows, a, d, states, step, found=found)
        update_few(rows, a, d, states, step, found=found)
        return found

    def time_steps(self, dt: Tensor, bias: Tensor) -> Tensor:
        rows, heads = dt.shape
        if not rows or dt.stride(1) != 1:
            return super().time_steps(dt, bias)
        from vllm_gaudi_ucm.ops.state_space.impl.cuda.triton import update as kernels

        found = torch.empty((rows, heads), dtype=torch.float32, device=dt.device)
        kernels.take_time_steps[(-(-rows * heads // STEPS),)](
            *(dt, bias, found, rows * heads, dt.stride(0)), HEADS=heads, BLOCK=STEPS, num_warps=WARPS
        )
        return found


def update_few(rows: SpaceRows, a: Tensor, d: Tensor | None, states: Tensor, step: StateRows, *, found: Tensor) -> None:
    """Computes requests with few rows, and writes their results to `found`, [rows, heads, head_dim], contiguous."""
    from vllm_gaudi_ucm.ops.state_space.impl.cuda.triton import update as kernels

    requests, few = step.few_rows.shape
    if not requests * few:
        return
    _, heads, head_dim, size = states.shape
    x, b, c = (rows_together(each) for each in (rows.x, rows.b, rows.c))
    sizes = 1 << (size - 1).bit_length()
    dims = min(1 << (head_dim - 1).bit_length(), max(STATE // sizes, 1))
    kernels.update_spaces[(requests * heads * -(-head_dim // dims),)](
        *(x, rows.dt.float().contiguous(), b, c, a, a if d is None else d),
        *(states, found, step.few_rows, step.few_sources, step.few_targets),
        *(x.stride(0), b.stride(0), c.stride(0)),
        HEADS=heads,
        REPEATS=heads // b.shape[1],
        HEAD_DIM=head_dim,
        SIZE=size,
        FEW=few,
        SKIP=d is not None,
        DIMS=dims,
        SIZES=sizes,
        num_warps=WARPS,
    )
