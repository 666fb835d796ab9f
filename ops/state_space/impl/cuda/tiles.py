"""State-space layers for prompts on CUDA: one launch walks through the tiles.

The kernel is imported where it is launched, because triton is optional.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cuda.state_tiles import Products, block_of
from vllm_gaudi_ucm.ops.state_rows import NULL_SLOT, StateRows, rows_together
from vllm_gaudi_ucm.ops.state_space.implementation import SpaceRows

MOST_STATE = 256
"""Entries of a state for each dimension of a head: a program keeps them in registers."""
DIMS, WARPS, STAGES = 64, 8, 2


def scan_prompts(
    rows: SpaceRows, a: Tensor, d: Tensor | None, states: Tensor, step: StateRows, *, found: Tensor
) -> None:
    """Computes the rows of tiles, and writes their results to `found`, [rows, heads, head_dim], contiguous.

    States have at most MOST_STATE entries for each dimension of a head.
    """
    import triton.language as tl

    from vllm_gaudi_ucm.ops.state_space.impl.cuda.triton import tiles as kernels

    (tiles, width), (_, heads, head_dim, size) = step.tile_rows.shape, states.shape
    x, b, c = (rows_together(each) for each in (rows.x, rows.b, rows.c))
    products = Products.of_rows()
    dims = min(DIMS, block_of(head_dim))
    kernels.walk_spaces[(heads * -(-head_dim // dims), tiles)](
        *(x, rows.dt.float().contiguous(), b, c, a, a if d is None else d, states, found),
        *(step.tile_rows, step.tile_sources, step.tile_targets, tiles, x.stride(0), b.stride(0), c.stride(0)),
        HEADS=heads,
        REPEATS=heads // b.shape[1],
        HEAD_DIM=head_dim,
        SIZE=size,
        WIDTH=width,
        SKIP=d is not None,
        DIMS=dims,
        SIZES=block_of(size),
        ROWS=block_of(width),
        TILES=1 << (tiles - 1).bit_length(),
        STAGES=STAGES if products.operand.itemsize < 4 else 1,
        OPERAND=tl.bfloat16 if products.operand == torch.bfloat16 else tl.float32,
        PRECISION=products.precision,
        NULL=NULL_SLOT,
        num_warps=WARPS,
    )
