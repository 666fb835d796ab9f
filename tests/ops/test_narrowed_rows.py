"""Products of rows that are rounded to 8-bit floats with a measured scale, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.ops.quantised import packed_layer, random_weight
from vllm_gaudi_ucm.ops.quantised_linear.api import QuantisedWeight, Target, choose_product
from vllm_gaudi_ucm.ops.quantised_linear.narrowed_rows import NarrowedRows, multiply_narrowed, narrow_rows
from vllm_gaudi_ucm.ops.quantised_linear.weight import RowNarrowing


def narrowed_weight(scale: float = 0.25, largest: float = 240.0) -> QuantisedWeight:
    weight = random_weight(24, 64, (1, 64), torch.float8_e4m3fn)
    exact = torch.tensor(scale)
    return weight._replace(narrowing=RowNarrowing(exact, 1 / exact, largest))


def test_rows_are_the_nearest_codes() -> None:
    """Three bits after the first; ties go to the even one, and numbers beyond the range to its end."""
    x = torch.tensor([0.0, 0.26, 0.265625, -0.3, 59.0, 61.0, -1e9, float("nan")])
    found = narrow_rows(x, torch.tensor(0.25), torch.tensor(4.0), 240.0)
    assert found[:-1].tolist() == [0.0, 0.25, 0.25, -0.3125, 60.0, 60.0, -60.0]
    assert bool(found[-1].isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_a_product_of_the_device(dtype: torch.dtype) -> None:
    """On a CPU the plain weight is multiplied, in the dtype of the model."""
    weight = narrowed_weight()
    product = choose_product(weight, Target("cpu", dtype))
    assert isinstance(product, NarrowedRows)
    layer = packed_layer(product, weight)
    assert layer.weight.dtype == dtype
    x, bias = (torch.randn(2, 3, 64) * 40).to(dtype), torch.randn(24).to(dtype)
    found = product.multiply(x, layer, bias)
    expected = multiply_narrowed(x, weight, bias)
    assert (found.shape, found.dtype) == ((2, 3, 24), dtype)
    limit = 4 * torch.finfo(dtype).eps * float(expected.abs().amax())
    torch.testing.assert_close(found, expected, atol=limit, rtol=limit)
    unrounded = weight._replace(narrowing=None)
    assert choose_product(unrounded, Target("cpu", dtype)) is None


def test_a_product_that_does_not_round_gets_rounded_rows() -> None:
    """As on a GPU, whose kernel reads codes."""
    weight, seen = narrowed_weight(), []

    class Inner:
        def pack(self, given: QuantisedWeight) -> dict[str, torch.Tensor]:
            assert given.narrowing is None
            return {"codes": given.codes}

        def multiply(self, x: torch.Tensor, layer: object, bias: torch.Tensor | None) -> torch.Tensor:
            seen.append(x)
            return x

    product = NarrowedRows(Inner(), weight, torch.float32)
    layer, x = packed_layer(product, weight), torch.randn(3, 64) * 100
    assert set(dict(layer.named_parameters())) == {"codes", "input_scale"}
    product.multiply(x, layer, None)
    assert torch.equal(seen[0], narrow_rows(x, torch.tensor(0.25), torch.tensor(4.0), 240.0))
