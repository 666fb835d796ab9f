"""Lays out codes in memory: whole bytes, or two codes of 4 bits in each."""

from typing import Literal

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.quantised_linear.weight import E2M1, QuantisedWeight

# Inputs that a kernel multiplies at a time.
MOST_INPUTS, FEWEST_INPUTS = 128, 32

CodeKind = Literal["whole", "uint4", "e2m1"]
"""The kind of codes: one per byte; unsigned integers of 4 bits; floats of 4 bits, whose values are e4m3 values, too."""


def group_of(weight: QuantisedWeight) -> int | None:
    """Inputs that are multiplied at a time: a power of two that divides their number and has one scale; or None."""
    size = MOST_INPUTS
    while size >= FEWEST_INPUTS:
        if weight.inputs % size == 0 and (weight.by_channel or weight.block[1] % size == 0):
            return size
        size //= 2
    return None


def pack_codes(codes: Tensor, kind: CodeKind, group: int) -> Tensor:
    """Packs codes as [..., inputs], or two in a byte as [..., inputs / 2]: byte j of a group has codes j (low) and j +
    group / 2.

    codes: as in `QuantisedWeight`; of the kind e2m1 the e4m3 that `unpack_e2m1` makes. group: divides the inputs.
    """
    if kind == "whole":
        return codes.contiguous()
    if kind == "e2m1":
        codes = _numbers(codes.device).index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)
    low, high = codes.unflatten(-1, (-1, 2, group // 2)).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpack_codes(packed: Tensor, kind: CodeKind, group: int) -> Tensor:
    """The codes that `pack_codes` was given."""
    if kind == "whole":
        return packed
    halves = packed.unflatten(-1, (-1, 1, group // 2))
    codes = torch.cat((halves & 15, halves >> 4), -2).flatten(-3)
    if kind == "uint4":
        return codes
    return _e4m3(packed.device)[codes.int()].view(torch.float8_e4m3fn)


def _e4m3(device: torch.device) -> Tensor:
    """uint8 [16]: the bits of an e4m3 by the number of an e2m1."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=device)
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def _numbers(device: torch.device) -> Tensor:
    """uint8 [256]: the number of an e2m1 by the bits of an e4m3; 0 if there is none."""
    found = torch.zeros(256, dtype=torch.uint8, device=device)
    found[_e4m3(device).long()] = torch.arange(16, dtype=torch.uint8, device=device)
    return found
