"""Rows that are rounded to 8-bit integers, element by element in Python's integers, and products with them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.ops.quantised import random_weight
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight, RowRounding

ROUNDINGS = {
    "each row": RowRounding(),
    "each row, with zeros": RowRounding(False),
    "fixed": RowRounding(scale=torch.tensor(0.02)),
    "fixed, with a zero": RowRounding(False, torch.tensor(0.017), torch.tensor(-35.0)),
}


def weight_of(name: str, outputs: int, inputs: int) -> QuantisedWeight:
    """With codes of -128 to 127. name: of `ROUNDINGS`."""
    return random_weight(outputs, inputs, (1, inputs), torch.int8)._replace(rounding=ROUNDINGS[name])


def spoilt_rows(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Rows of many sizes; of eight, row 3 is zeros, 4 has NaN, 5 an infinity, 6 is too small for an inverse."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    x *= 2.0 ** torch.arange(-3, rows - 3).unsqueeze(1).clamp(max=4)
    x[:, 0] = 2.0
    if rows > 6:
        x[3], x[4, 1], x[5, 2] = 0, math.nan, math.inf
        x[6] = 1e-42
    return x.to(dtype)


def _f32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


def _codes(row: list[float], rounding: RowRounding) -> tuple[list[int], float, int]:
    """Codes, scale and zero of a row of finite numbers."""
    if rounding.scale is not None:
        scale = float(rounding.scale)
        zero = 0 if rounding.zero is None else int(rounding.zero)
        inverse = _f32(1 / scale)
    else:
        most, least = max(*row, 0.0), min(*row, 0.0)
        width = max(most, -least) if rounding.symmetric else _f32(most - least)
        steps = 127 if rounding.symmetric else 255
        if width == 0 or steps / width > torch.finfo(torch.float32).max:
            return [0] * len(row), 0.0, 0
        inverse, scale = _f32(steps / width), _f32(width / steps)
        # Python rounds ties to even, too
        zero = 0 if rounding.symmetric else round(_f32(-least * inverse)) - 128
    codes = [max(-128, min(127, round(max(-1024.0, min(1024.0, _f32(x * inverse)))) + zero)) for x in row]
    return codes, scale, zero


def oracle(x: Tensor, weight: QuantisedWeight, bias: Tensor) -> Tensor:
    """float64 [rows, outputs]; NaN of rows that are not finite, but for infinities beyond a fixed range."""
    rounding = weight.rounding
    assert rounding is not None
    found = torch.full((len(x), weight.outputs), math.nan, dtype=torch.float64)
    for index, row in enumerate(x.float().tolist()):
        if any(math.isnan(one) or (math.isinf(one) and rounding.scale is None) for one in row):
            continue
        codes, scale, zero = _codes(row, rounding)
        sums = (weight.codes.long() * torch.tensor([code - zero for code in codes])).sum(1)
        found[index] = sums.double() * scale * weight.scales.flatten().double() + bias.double()
    return found


def assert_near(found: Tensor, x: Tensor, weight: QuantisedWeight, bias: Tensor) -> None:
    """Integer sums are exact: what is left is the rounding of three products and a sum, and that of the result."""
    expected = oracle(x, weight, bias)
    assert torch.equal(found.isnan(), expected.isnan())
    rounded = (expected - bias.double()).abs() * 4 + bias.double().abs() + expected.abs()
    budget = rounded * torch.finfo(torch.float32).eps + expected.abs() * torch.finfo(found.dtype).eps
    budget += 1e-30
    assert bool(((found.double() - expected).abs() <= budget).logical_or(expected.isnan()).all())
