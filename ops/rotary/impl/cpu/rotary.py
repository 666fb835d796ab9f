"""Rotary position embedding (NeoX style: rotates the halves of a head), in place, in one pass on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cpu.native.library import HALF_TYPES, is_half_rows, is_rows, native


def can_rotate(query: Tensor, key: Tensor, positions: Tensor, angles: Tensor) -> bool:
    """True if `rotate` supports these tensors here: rows of one dtype on a CPU, and built native kernels."""
    return (
        not torch.compiler.is_compiling()
        and native() is not None
        and query.dtype == key.dtype == angles.dtype
        and all(is_rows(tensor) or is_half_rows(tensor) for tensor in (query, key, angles))
        and angles.is_contiguous()
        and positions.dtype == torch.int64
        and positions.dim() == 1
        and positions.shape[0] == query.shape[0] == key.shape[0]
        and positions.is_contiguous()
    )


def rotate(query: Tensor, key: Tensor, positions: Tensor, angles: Tensor, head_size: int) -> None:
    """Rotates the first elements of every head in place: (a, b) -> (a cos - b sin, b cos + a sin).

    query: [rows, heads * head_size]; key: [rows, kv_heads * head_size]; there may be gaps between rows.
    positions: int64 [rows]. angles: [positions, rotary size], cosines before sines.
    `can_rotate` must hold for the arguments. Raises IndexError for a position without angles.
    """
    kernels = native()
    assert kernels is not None, "can_rotate said no"
    is_half = query.dtype in HALF_TYPES
    turn = kernels.ucm_rotary_half if is_half else kernels.ucm_rotary
    row = turn(
        query.data_ptr(),
        query.stride(0),
        query.shape[1] // head_size,
        key.data_ptr(),
        key.stride(0),
        key.shape[1] // head_size,
        positions.data_ptr(),
        query.shape[0],
        angles.data_ptr(),
        angles.shape[0],
        head_size,
        angles.shape[1],
        *((HALF_TYPES[query.dtype],) if is_half else ()),
    )
    if row >= 0:
        raise IndexError(
            f"rotate: row {row} has position {int(positions[row])}, expected one from 0 to {angles.shape[0] - 1}"
        )
