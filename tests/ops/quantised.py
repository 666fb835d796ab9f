"""Quantised weights for tests, and what products with them are in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.ops.quantised_linear.api import Product
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight


def random_weight(
    outputs: int, inputs: int, block: tuple[int, int], codes: torch.dtype, bits: int = 8, seed: int = 0
) -> QuantisedWeight:
    """bits: of unsigned codes, which have zeros."""
    generator = torch.Generator().manual_seed(seed)
    shape = (-(-outputs // block[0]), -(-inputs // block[1]))
    scales = torch.rand(shape, generator=generator) * 0.02 + 0.001
    if codes == torch.uint8:
        found = torch.randint(1 << bits, (outputs, inputs), generator=generator).to(codes)
        zeros = torch.randint(1 << bits, shape, generator=generator).to(torch.uint8)
        return QuantisedWeight(found, scales, block, zeros)
    if codes == torch.int8:
        return QuantisedWeight(
            torch.randint(-128, 128, (outputs, inputs), generator=generator).to(codes), scales, block
        )
    values = torch.randn(outputs, inputs, generator=generator) * 60
    return QuantisedWeight(values.clamp(-448, 448).to(codes), scales, block)


def packed_layer(product: Product, weight: QuantisedWeight) -> nn.Module:
    """With the parameters that the product packs of a weight."""
    layer = nn.Module()
    for name, tensor in product.pack(weight).items():
        setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
    return layer


def exact(weight: QuantisedWeight) -> Tensor:
    """float64, element by element."""
    rows = torch.arange(weight.outputs) // weight.block[0]
    columns = torch.arange(weight.inputs) // weight.block[1]
    codes = weight.codes.double()
    if weight.zeros is not None:
        codes = codes - weight.zeros.double()[rows][:, columns]
    return codes * weight.scales.double()[rows][:, columns]
