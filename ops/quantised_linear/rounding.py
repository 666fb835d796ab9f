"""Rounds rows to 8-bit integers before their product, if a checkpoint asks for it: the definition of all
implementations.

An element becomes `round(element * inverse) + zero`, ties to even, within -128 to 127, and counts as
`(code - zero) * scale`. Sums of products of codes are integers, and exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.quantised_linear.weight import RowRounding

if TYPE_CHECKING:
    from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight

LEAST, MOST = -128, 127
# With more inputs a sum of products, or what corrects it, might leave 32 bits.
MOST_INPUTS = 65536


class RoundedRows(NamedTuple):
    """codes: int8 [rows, inputs]. scales: float32 [rows, 1]. zeros: int32 [rows, 1]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor


def joined(scales: Tensor, zeros: Tensor | None) -> RowRounding:
    """Returns one rounding for matrices that are multiplied with the same rows. It covers the range of each, as in
    vLLM.

    scales: float32 [matrices]. zeros: zero points of codes, integers [matrices]; None: all are 0.
    """
    if zeros is None:
        return RowRounding(scale=scales.amax())
    most, least = (scales * (MOST - zeros.float())).amax(), (scales * (LEAST - zeros.float())).amin()
    scale = (most - least) / (MOST - LEAST)
    return RowRounding(False, scale, (LEAST - least / scale).round())


def round_rows(x: Tensor, rounding: RowRounding) -> RoundedRows:
    """Rounds x, float [rows, inputs]. A row with NaN, or whose own scale would not be finite, has the scale NaN."""
    x = x.float()
    if rounding.scale is not None:
        scale = torch.where(x.isnan().any(1, keepdim=True), torch.nan, rounding.scale.reshape(1, 1).float())
        inverse = 1 / rounding.scale.reshape(1, 1).float()
        zero = torch.zeros_like(scale) if rounding.zero is None else rounding.zero.float().expand_as(scale)
    else:
        most, least = x.amax(1, keepdim=True).clamp_min(0), x.amin(1, keepdim=True).clamp_max(0)
        width = torch.maximum(most, -least) if rounding.symmetric else most - least
        # dividing a number by a tensor would multiply by its reciprocal
        steps = torch.full_like(width, 127 if rounding.symmetric else 255)
        # a scale too small for an inverse is zero
        is_sound = width.isfinite() & (steps / width).isfinite()
        inverse = torch.where(is_sound, steps / width, 0)
        scale = torch.where(is_sound, width / steps, torch.where(width.isfinite(), 0, torch.nan))
        zero = torch.where(is_sound & (not rounding.symmetric), (-least * inverse).round() + LEAST, 0)
    codes = ((x * inverse).nan_to_num(0, 1024, -1024).round() + zero).clamp(LEAST, MOST)
    return RoundedRows(codes.to(torch.int8), scale, zero.to(torch.int32))


def multiply_rounded(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiplies rounded rows [rows, inputs] by a weight that has a `rounding`, in the dtype of x.

    weight: int8 with a scale per output. Sums of integers are exact in float64.
    """
    assert weight.rounding is not None, "see QuantisedWeight"
    rows = round_rows(x, weight.rounding)
    sums = (rows.codes.double() - rows.zeros) @ weight.codes.double().t()
    found = sums.float() * rows.scales * weight.scales.reshape(1, -1)
    return (found if bias is None else found + bias.float()).to(x.dtype)
