"""Linear layers with quantised weights: which form a device keeps them in, and the product with it.

Without a form of its own a device gets plain weights (`dequantise`), which defines what all products mean; what rounded
rows mean `rounding.multiply_rounded` defines.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.ops.quantised_linear.impl.cpu.int8 import CpuInt8
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.codes import CudaCodes, CudaFp8
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.int8 import CudaInt8
from vllm_gaudi_ucm.ops.quantised_linear.impl.hpu.products import GaudiFp8, GaudiUint4
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight, dequantise

__all__ = ["Product", "QuantisedWeight", "Target", "choose_product", "dequantise"]


class Product(Protocol):
    """A product of rows with a weight that stays quantised."""

    def pack(self, weight: QuantisedWeight) -> dict[str, Tensor]:
        """The tensors that `multiply` finds as the layer's attributes."""

    def multiply(self, x: Tensor, layer: nn.Module, bias: Tensor | None) -> Tensor:
        """x [..., inputs] in the model's dtype -> [..., outputs] in that dtype."""


class Target(NamedTuple):
    """What a layer is computed on. largest: magnitude of its e4m3."""

    device: str
    dtype: torch.dtype
    largest: float = 448.0


def choose_product(weight: QuantisedWeight, target: Target) -> Product | None:
    """What multiplies such a weight where it lies; None: plain weights are as good, or the only way.

    A CPU has plain weights but for rounded rows: they are packed like any others, in fewer bits where that is exact. So
    has Gaudi for codes of 8 bits with scales by block: to give each output one scale would change the weights.
    """
    if target.device == "hpu":
        if GaudiFp8.covers(weight):
            return GaudiFp8(target.largest)
        return GaudiUint4(target.dtype) if GaudiUint4.covers(weight) else None
    if target.device == "cuda":
        if CudaInt8.covers(weight):
            return CudaInt8(weight)
        if CudaFp8.covers(weight, target.dtype):
            return CudaFp8(weight)
        return CudaCodes(weight) if CudaCodes.covers(weight) else None
    return CpuInt8(weight) if CpuInt8.covers(weight) else None
