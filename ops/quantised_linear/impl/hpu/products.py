"""Products on Gaudi: 8-bit floats by the fused product, integers of 4 bits dequantised by one operator.

Operators come from Gaudi's software and are looked up once. All code is traceable, at static shapes, and tensors are
the layer's parameters: one recipe serves all layers of a shape.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.ops.hpu.operators import CAST_TO_FP8, CONVERT_FROM_UINT4, FP8_GEMM
from vllm_gaudi_ucm.ops.narrow_floats import E4M3
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight

if TYPE_CHECKING:
    from vllm_gaudi_ucm.ops.quantised_linear.api import Product, Target

# Rows of zeros have no scale; this one keeps them zeros, and its inverse is finite in bfloat16.
SMALLEST_SCALE = 1e-12


@cache
def _has_fp8() -> bool:
    return all(operator.resolve().call is not None for operator in (CAST_TO_FP8, FP8_GEMM))


@cache
def _has_uint4() -> bool:
    return CONVERT_FROM_UINT4.resolve().call is not None


class GaudiFp8:
    """Multiplies e4m3 rows by an e4m3 weight with a scale per output; each row gets its own scale, or all have one that
    was measured.

    Args:
        largest: the largest magnitude of an e4m3: 240 on a Gaudi 2, otherwise 448.
        measured: whether weights have a `narrowing`.
    """

    def __init__(self, largest: float, measured: bool = False) -> None:
        self._largest, self._measured = largest, measured

    @staticmethod
    def covers(weight: QuantisedWeight) -> bool:
        """True if this form holds the weight, and this machine has the operators."""
        is_e4m3 = weight.codes.dtype == torch.float8_e4m3fn and weight.zeros is None
        return is_e4m3 and weight.by_channel and weight.block[0] == 1 and _has_fp8()

    def pack(self, weight: QuantisedWeight) -> dict[str, Tensor]:
        """Packs on the host, because the card has no numbers beyond its range.

        If any code is out of range, all are halved and the scales doubled. Values below 2 ** -6 lose their last bit.
        """
        codes, scales = weight.codes, weight.scales.flatten()
        if self._largest < 448 and float(codes.float().abs().amax()) > self._largest:
            codes, scales = (codes.float() * 0.5).to(torch.float8_e4m3fn), scales * 2
        packed = {"weight": codes, "weight_scale": scales}
        if weight.narrowing is None:
            return packed
        scale, inverse = weight.narrowing.pair().unbind()
        return {**packed, "input_scale": scale.reshape(1), "input_inverse": inverse.reshape(1)}

    def multiply(self, x: Tensor, layer: nn.Module, bias: Tensor | None) -> Tensor:
        """Multiplies x [..., inputs]. The rounding error of an input is up to 1/16 of itself, or 2 ** -10 of the
        largest of its row if that is more.
        """
        rows = x.reshape(-1, x.shape[-1])
        if self._measured:
            # numbers beyond the measured range saturate
            scale = layer.input_scale
            narrow: Tensor = torch.ops.hpu.cast_to_fp8_v2(rows, layer.input_inverse, False, False, E4M3)[0]
        else:
            narrow, scale = narrow_rows(rows, self._largest)
        found: Tensor = torch.ops.hpu.fp8_gemm_v2(
            narrow, False, layer.weight, True, None, x.dtype, scale, layer.weight_scale, bias, False
        )
        return found.reshape(*x.shape[:-1], found.shape[-1])


def narrow_rows(rows: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """e4m3 [rows, inputs], and float32 [rows, 1], the scale of each row. largest: the largest magnitude of the card's
    e4m3.
    """
    scale = (rows.abs().amax(1, keepdim=True).float() / largest).clamp_min(SMALLEST_SCALE)
    narrow: Tensor = torch.ops.hpu.cast_to_fp8_v2(rows, scale.reciprocal(), False, False, torch.float8_e4m3fn)[0]
    return narrow, scale


class GaudiUint4:
    """Multiplies rows by a weight of 4 bits with scales and zeros per group of inputs, dequantised in the dtype of the
    rows.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @staticmethod
    def covers(weight: QuantisedWeight) -> bool:
        """True if this form holds the weight, and this machine has the operator."""
        if weight.zeros is None or weight.codes.dtype != torch.uint8 or weight.block[0] != 1:
            return False
        fits = weight.outputs % 8 == 0 and weight.inputs % weight.block[1] == 0
        return fits and int(weight.codes.amax()) < 16 and _has_uint4()

    def pack(self, weight: QuantisedWeight) -> dict[str, Tensor]:
        assert weight.zeros is not None
        return {
            "qweight": _words(weight.codes.t()),
            "scales": weight.scales.t().to(self._dtype).contiguous(),
            "qzeros": _words(weight.zeros.t()),
        }

    def multiply(self, x: Tensor, layer: nn.Module, bias: Tensor | None) -> Tensor:
        """Multiplies x [..., inputs]. The operator dequantises the weight: products are rounded to the dtype of x."""
        weight = torch.ops.hpu.convert_from_uint4(layer.qweight, layer.scales, layer.qzeros, x.dtype)
        found = torch.matmul(x, weight)
        return found if bias is None else found + bias


def _words(codes: Tensor) -> Tensor:
    """int32 [n, outputs / 8] of codes [n, outputs] of 4 bits, lowest bits first."""
    eights = codes.unflatten(1, (-1, 8)).to(torch.int64)
    words = (eights << torch.arange(0, 32, 4, device=codes.device)).sum(-1)
    # as two's complement: converting values beyond int32 is undefined
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def choose(weight: QuantisedWeight, target: Target) -> Product | None:
    """See `choose_product`.

    Codes of 8 bits with scales by block become plain weights: one scale for each output would change them.
    """
    if GaudiFp8.covers(weight):
        return GaudiFp8(target.largest, weight.narrowing is not None)
    if weight.narrowing is not None:
        raise ValueError(
            "rows are rounded by measured ranges (QUANT_CONFIG), for which this Gaudi software lacks cast_to_fp8_v2 or "
            "fp8_gemm_v2; take a newer release, or serve without --quantization inc"
        )
    return GaudiUint4(target.dtype) if GaudiUint4.covers(weight) else None
