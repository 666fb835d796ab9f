"""Products with quantised weights on the simulated card, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.ops.quantised import exact, random_weight
from vllm_gaudi_ucm.ops.quantised_linear.api import Product, QuantisedWeight, Target, choose_product
from vllm_gaudi_ucm.ops.quantised_linear.impl.hpu.products import GaudiFp8, GaudiUint4
from vllm_gaudi_ucm.ops.quantised_linear.narrowed_rows import multiply_narrowed
from vllm_gaudi_ucm.ops.quantised_linear.weight import RowNarrowing

PT_HPU_LAZY_MODE = "0"


def product_of(weight: QuantisedWeight, dtype: torch.dtype, largest: float = 240.0) -> Product | None:
    return choose_product(weight, Target("hpu", dtype, largest))


def multiply(product: Product, weight: QuantisedWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
    layer = nn.Module()
    for name, tensor in product.pack(weight).items():
        setattr(layer, name, nn.Parameter(tensor.to("hpu"), requires_grad=False))
    found = product.multiply(x.to("hpu"), layer, None if bias is None else bias.to("hpu"))
    return found.cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_floats_of_eight_bits(dtype: torch.dtype) -> None:
    """A row's numbers are off by half a last place of three bits; codes beyond 240 are halved when they are packed.

    Budget of a product: each of its terms by 2 ** -4 (rows), and those that are small by the grid of the smallest
    numbers, 2 ** -10 of the largest; halved codes by 2 ** -10 of a scale; the result once by its dtype.
    """
    weight = random_weight(24, 64, (1, 64), torch.float8_e4m3fn)
    weight.codes[3, 5] = 448
    product = product_of(weight, dtype)
    assert isinstance(product, GaudiFp8)
    x, bias = torch.randn(5, 64).to(dtype), torch.randn(24).to(dtype)
    x[3] = 0
    found = multiply(product, weight, x, bias)
    assert found.dtype == dtype
    assert found.isfinite().all()
    meant, rows = exact(weight), x.double()
    oracle = rows @ meant.T + bias.double()
    grid = rows.abs().amax(1, keepdim=True) * 2.0**-10 / 240
    terms = rows.abs() * (2.0**-4 + 2.0**-7) + grid
    halved = rows.abs().sum(1, keepdim=True) * weight.scales.double().T * 2.0**-9
    budget = terms @ meant.abs().T + halved + oracle.abs() * torch.finfo(dtype).eps
    assert bool(((found.double() - oracle).abs() <= budget).all())
    assert torch.equal(found[3], bias), "a row of zeros has no scale"


def test_rows_with_a_measured_scale() -> None:
    """The product equals the rounded rows' one, but for the order of sums; numbers beyond the card's range saturate."""
    weight = random_weight(24, 64, (1, 64), torch.float8_e4m3fn)
    weight = weight._replace(narrowing=RowNarrowing(torch.tensor(0.25), torch.tensor(4.0), 448.0))
    product = product_of(weight, torch.float32, 448.0)
    assert isinstance(product, GaudiFp8)
    x, bias = torch.randn(2, 3, 64) * 10, torch.randn(24)
    x[0, 0, 0] = 1e4
    found = multiply(product, weight, x, bias)
    torch.testing.assert_close(found, multiply_narrowed(x, weight, bias), atol=1e-3, rtol=1e-5)


def test_codes_within_the_range_are_kept() -> None:
    weight = random_weight(8, 16, (1, 16), torch.float8_e4m3fn)
    weight.codes[3, 5] = 448
    for largest, found in (
        (448.0, weight),
        (240.0, weight._replace(codes=(weight.codes.float() / 2).to(weight.codes.dtype))),
    ):
        product = product_of(found, torch.bfloat16, largest)
        assert product is not None
        packed = product.pack(found)
        assert torch.equal(packed["weight"].view(torch.uint8), found.codes.view(torch.uint8))
        assert torch.equal(packed["weight_scale"], found.scales.flatten())


@pytest.mark.parametrize("group", [16, 64])
def test_integers_of_four_bits(group: int) -> None:
    """In float32 nothing is rounded but sums."""
    weight = random_weight(24, 64, (1, group), torch.uint8, bits=4)
    product = product_of(weight, torch.float32)
    assert isinstance(product, GaudiUint4)
    x, bias = torch.randn(2, 3, 64), torch.randn(24)
    found = multiply(product, weight, x, bias)
    torch.testing.assert_close(found.double(), x.double() @ exact(weight).T + bias.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "weight",
    [
        random_weight(8, 32, (8, 16), torch.float8_e4m3fn),
        random_weight(8, 32, (1, 32), torch.int8),
        random_weight(8, 32, (1, 32), torch.uint8, bits=8),
        random_weight(6, 32, (1, 32), torch.uint8, bits=4),
    ],
)
def test_plain_weights_otherwise(weight: QuantisedWeight) -> None:
    assert product_of(weight, torch.bfloat16) is None
