"""Scales as Intel Neural Compressor (INC) makes them of maxima, and weights quantised with them.

A number is `code * scale`; a code is an e4m3 within a card's range. As in INC on a card, scales are computed in
bfloat16: a quotient is a product with the inverse, which is rounded to bfloat16, too. A number becomes a code likewise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.layers.measured.quant_config import Rounding, ScaleMethod
from vllm_gaudi_ucm.ops.quantised_linear.weight import CHUNK_ROWS, QuantisedWeight, RowNarrowing


class CardRange(NamedTuple):
    """The range of a card's e4m3, and the scales that its products take without a cost.

    largest: the largest magnitude of a code. exponents: least and most of a scale's. step: between two of them.
    """

    largest: float
    least: int
    most: int
    step: int


RANGES = {"GAUDI2": CardRange(240.0, -8, 4, 4), "GAUDI3": CardRange(448.0, -55, 7, 1)}


def scales_of(maxima: Tensor, rounding: Rounding, backoff: float, card: CardRange) -> Tensor:
    """Returns bfloat16 scales of maxima of any shape. A maximum of 0 has the scale 1 or more."""
    maxima = maxima.to(torch.bfloat16)
    if rounding == "unit":
        return torch.ones_like(maxima)
    if rounding == "single":
        return torch.full_like(maxima, 2.0**card.most)
    # a quotient would differ from the files that INC wrote on a Gaudi
    scales = maxima * torch.tensor(1 / (card.largest * backoff), dtype=torch.bfloat16)
    if rounding == "none":
        return torch.where(maxima == 0, 1, scales)
    exponents = torch.ceil(torch.log2(scales))
    if rounding == "hardware":
        steps = torch.ceil(exponents / card.step) * card.step
        return torch.exp2(steps.clamp(card.least, card.most))
    return torch.where(maxima == 0, 1, torch.exp2(exponents))


def narrowing_of(scale: float, card: CardRange) -> RowNarrowing:
    """Returns the rounding of rows with a scale, which is a bfloat16."""
    exact = torch.tensor(scale, dtype=torch.bfloat16)
    return RowNarrowing(exact.float(), exact.reciprocal().float(), card.largest)


def row_scale(maximum: float, method: ScaleMethod, card: CardRange) -> float:
    """Returns the scale of a layer's rows."""
    return float(scales_of(torch.tensor(maximum), method.rows, method.rows_backoff, card))


def quantise(weight: Tensor, method: ScaleMethod, card: CardRange, rows: RowNarrowing | None) -> QuantisedWeight:
    """Quantises a weight [outputs, inputs], a rank's part of it. rows: how the rows are rounded that it multiplies."""
    by_output = weight.abs().amax(1, keepdim=True)
    maxima = by_output if method.by_channel else by_output.amax().expand_as(by_output)
    scales = scales_of(maxima, method.weights, method.weights_backoff, card)
    inverses = scales.reciprocal().float()
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for start in range(0, len(weight), CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        numbers = (weight[part].float() * inverses[part]).clamp(-card.largest, card.largest)
        codes[part] = numbers.to(torch.float8_e4m3fn)
    return QuantisedWeight(codes, scales.float().contiguous(), (1, weight.shape[1]), narrowing=rows)
