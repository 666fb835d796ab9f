"""Rotary position embedding on CUDA in Triton: query and key in one launch, in place.

The kernel is imported where it is launched, because triton is optional.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.registry import why_not_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Pairs of elements of a program, and of a thread: in half precision two loads of 16 bytes.
PROGRAM, THREAD = 512, 8


def can_rotate(query: Tensor, key: Tensor | None, positions: Tensor, angles: Tensor, head_size: int) -> bool:
    """True if `cuda_rotate` covers these tensors, on their device."""
    return (
        why_not_triton(query.device.type) is None
        and all(_is_covered(x, head_size, len(positions)) for x in (query, key) if x is not None)
        and positions.dtype == torch.int64
        and positions.dim() == 1
        and positions.is_contiguous()
        and angles.is_contiguous()
        and 0 < angles.shape[1] <= head_size
    )


def cuda_rotate(
    query: Tensor, key: Tensor | None, positions: Tensor, angles: Tensor, head_size: int, is_neox: bool
) -> None:
    """Rotates the first elements of every head in place: (a, b) -> (a cos - b sin, b cos + a sin).

    query: [rows, heads * head_size] or [rows, heads, head_size]; key the same of the KV heads, or None; there may be
    gaps between rows. positions: int64 [rows]. angles: [positions, rotary size], cosines before sines. is_neox: halves
    of a head are rotated against each other; otherwise neighbours.

    Computed in float32 and rounded once. Nothing is read on the host, so a position without angles makes NaN.
    `can_rotate` must hold for the arguments.
    """
    from vllm_gaudi_ucm.ops.rotary.impl.cuda.triton import heads as kernels

    if not len(positions):
        return
    half = angles.shape[1] // 2
    heads, *q_strides = _heads(query, head_size)
    kv_heads, *k_strides = (0, 0, 0) if key is None else _heads(key, head_size)
    block_half = 1 << (half - 1).bit_length()
    block_heads = max(1, PROGRAM // block_half)
    groups = -(-heads // block_heads) + -(-kv_heads // block_heads)
    kernels.rotate_heads[(len(positions), groups)](
        query,
        query if key is None else key,
        positions,
        angles,
        angles.shape[0],
        *q_strides,
        *k_strides,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        IS_NEOX=is_neox,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=max(1, block_heads * block_half // (32 * THREAD)),
    )


def _is_covered(x: Tensor, head_size: int, rows: int) -> bool:
    whole = x.shape[1] % head_size == 0 if x.dim() == 2 else x.dim() == 3 and x.shape[2] == head_size
    return whole and x.dtype in DTYPES and x.shape[0] == rows and x.stride(-1) == 1


def _heads(x: Tensor, head_size: int) -> tuple[int, int, int]:
    """Returns the number of heads, and the elements from row to row and from head to head."""
    if x.dim() == 3:
        return x.shape[1], x.stride(0), x.stride(1)
    return x.shape[1] // head_size, x.stride(0), head_size
