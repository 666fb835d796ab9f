"""8-bit floats (e4m3) of KV caches and block summaries: converting to them, from them, and writing them."""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
"""The dtype of caches of 8-bit floats."""


def _on_card(tensor: Tensor) -> bool:
    """True on a Gaudi, also while a region is traced. A traced tensor may not tell its device, but a process that has
    the card's bridge compiles only for the card.
    """
    return tensor.device.type == "hpu" or (torch.compiler.is_compiling() and hasattr(torch, "hpu"))


def has_e4m3(device: torch.device) -> bool:
    """True if a device multiplies them: a GPU of compute capability 8.9 or newer; torch converts on the others."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def narrow(numbers: Tensor) -> Tensor:
    """Converts floats of any shape to 8-bit floats. Values beyond their range are clamped to it; NaN stays NaN.

    The error of an element is up to 1/16 of itself, or 2 ** -10 if it is small.
    """
    if _on_card(numbers):
        found: Tensor = torch.ops.hpu.cast_to_fp8_v2(numbers, None, False, False, E4M3)[0]
        return found
    # torch 2.11 turns values beyond the range into NaN
    return numbers.clamp(-448, 448).to(E4M3)


def widened(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts 8-bit floats to another dtype, exactly; returns any other tensor unchanged."""
    if numbers.dtype != E4M3:
        return numbers
    if _on_card(numbers):
        found: Tensor = torch.ops.hpu.cast_from_fp8(numbers, None, dtype)
        return found
    return numbers.to(dtype)


def put(target: Tensor, dim: int, ids: Tensor, found: Tensor) -> None:
    """`target.index_copy_(dim, ids, found)` for any dtype, which both have."""
    if target.dtype == E4M3 and not _on_card(target):
        # torch has no such copy of 8-bit floats. A Gaudi has one, but cannot write a view in place
        target, found = target.view(torch.uint8), found.view(torch.uint8)
    target.index_copy_(dim, ids, found)
