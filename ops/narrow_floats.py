"""8-bit floats (e4m3) of KV caches and of summaries beside them: to them, from them, and where they are written."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
"""Of caches of 8-bit floats."""


def _on_card(tensor: Tensor) -> bool:
    """Also while a region is traced, where the stand-in for a tensor need not say where it is: what has the card's
    bridge compiles for the card alone."""
    return tensor.device.type == "hpu" or (torch.compiler.is_compiling() and hasattr(torch, "hpu"))


def has_e4m3(device: torch.device) -> bool:
    """True if a device converts and multiplies them: a GPU of compute capability 8.9 or newer; others by torch."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def narrow(numbers: Tensor) -> Tensor:
    """Floats of any shape as 8-bit floats, what is beyond their range at its end; NaN stays NaN.

    An element is off by up to 1/16 of itself, and by 2 ** -10 where it is small.
    """
    if _on_card(numbers):
        found: Tensor = torch.ops.hpu.cast_to_fp8_v2(numbers, None, False, False, E4M3)[0]
        return found
    # torch 2.11 makes NaN of what is beyond
    return numbers.clamp(-448, 448).to(E4M3)


def widened(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """8-bit floats in another dtype, exactly; anything else as it is."""
    if numbers.dtype != E4M3:
        return numbers
    if _on_card(numbers):
        found: Tensor = torch.ops.hpu.cast_from_fp8(numbers, None, dtype)
        return found
    return numbers.to(dtype)


def put(target: Tensor, dim: int, ids: Tensor, found: Tensor) -> None:
    """`target.index_copy_(dim, ids, found)` for any dtype, which both have."""
    if target.dtype == E4M3 and not _on_card(target):
        # torch has no such copy of 8-bit floats; a Gaudi has, and writes no view in place
        target, found = target.view(torch.uint8), found.view(torch.uint8)
    target.index_copy_(dim, ids, found)
