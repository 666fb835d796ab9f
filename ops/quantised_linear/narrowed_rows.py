"""Products of rows that are rounded to 8-bit floats with one measured scale: the definition of all implementations.

An element becomes the e4m3 next to `element * inverse`, within plus and minus `largest`, and counts as `code * scale`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.ops.narrow_floats import narrow, widened
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight, dequantise

if TYPE_CHECKING:
    from vllm_gaudi_ucm.ops.quantised_linear.product import Product

SCALE = "input_scale"
"""The layer's parameter of a row's scale and its inverse, float32 [2]: one recipe serves all layers."""


def narrow_rows(x: Tensor, scale: Tensor, inverse: Tensor, largest: float) -> Tensor:
    """Rounds x, floats of any shape, and returns the rounded numbers in the same dtype. NaN stays NaN."""
    codes = narrow((x.float() * inverse).clamp(-largest, largest))
    return (widened(codes, torch.float32) * scale).to(x.dtype)


def multiply_narrowed(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiplies rows [..., inputs] by a weight with a `narrowing`, in float64, and rounds once to the dtype of x."""
    assert weight.narrowing is not None, "see QuantisedWeight"
    rows = narrow_rows(x, *weight.narrowing)
    found = rows.double() @ dequantise(weight, torch.float64).t()
    return (found if bias is None else found + bias.double()).to(x.dtype)


class NarrowedRows:
    """Rounds rows, then multiplies them by another product, or by the plain weight.

    Args:
        product: a product that does not round rows; None: torch's, with the weight in the model's dtype.
    """

    def __init__(self, product: Product | None, weight: QuantisedWeight, dtype: torch.dtype) -> None:
        assert weight.narrowing is not None, "see QuantisedWeight"
        self._product, self._dtype, self._largest = product, dtype, weight.narrowing.largest

    def pack(self, weight: QuantisedWeight) -> dict[str, Tensor]:
        assert weight.narrowing is not None, "see QuantisedWeight"
        plain = weight._replace(narrowing=None)
        packed = {"weight": dequantise(plain, self._dtype)} if self._product is None else self._product.pack(plain)
        return {**packed, SCALE: weight.narrowing.pair()}

    def multiply(self, x: Tensor, layer: nn.Module, bias: Tensor | None) -> Tensor:
        """Multiplies x [..., inputs]."""
        scale, inverse = cast(Tensor, layer.input_scale).unbind()
        rows = narrow_rows(x, scale, inverse, self._largest)
        if self._product is not None:
            return self._product.multiply(rows, layer, bias)
        return nn.functional.linear(rows, cast(Tensor, layer.weight), bias)
