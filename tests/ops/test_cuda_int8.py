"""The CUDA kernels of rounded rows against Python's integers. On a GPU, or in the process of test_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from tests.ops.oracle import CUDA_RUNS
from tests.ops.quantised import packed_layer
from tests.ops.rounded import ROUNDINGS, assert_near, spoilt_rows, weight_of
from vllm_gaudi_ucm.ops.quantised_linear import rounding
from vllm_gaudi_ucm.ops.quantised_linear.api import Target, choose_product
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda import int8 as cuda_int8
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.int8 import CudaInt8
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.tiles import LinearTiles
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight, RowRounding

pytestmark = pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(weight: QuantisedWeight) -> QuantisedWeight:
    found = weight.rounding
    assert found is not None
    moved = (None if part is None else part.to(DEVICE) for part in (found.scale, found.zero))
    there = RowRounding(found.symmetric, *moved)
    return weight._replace(codes=weight.codes.to(DEVICE), scales=weight.scales.to(DEVICE), rounding=there)


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (19, 1), (19, 3)])
def test_cuda_rounded_rows(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, rows: int, splits: int
) -> None:
    """Also where parts of the inputs are summed up by themselves; rows lie within a larger tensor of NaN.

    Triton's interpreter cuts bf16 off where a GPU rounds.
    """
    weight = weight_of(name, 40, 300)
    here = on_device(weight)
    assert CudaInt8.covers(here)
    product = CudaInt8(here)
    layer = packed_layer(product, here)
    monkeypatch.setattr(cuda_int8, "tiles_of", lambda *_: LinearTiles(32, 32, splits))
    whole = torch.full((rows, 308), torch.nan, dtype=dtype, device=DEVICE)
    x = whole[:, :300]
    x.copy_(spoilt_rows(rows, 300, dtype))
    bias = torch.randn(40).to(dtype)
    assert_near(product.multiply(x, layer, bias.to(DEVICE)).cpu(), x.cpu(), weight, bias)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_cuda_codes_of_rows(name: str) -> None:
    """They are those of the reference, one by one."""
    found = ROUNDINGS[name]
    x = spoilt_rows(9, 77, torch.float32)
    expected = rounding.round_rows(x, found)
    fixed = found.fixed()
    rounded = cuda_int8.round_rows(x.to(DEVICE), found.symmetric, None if fixed is None else fixed.to(DEVICE))
    sound = ~expected.scales.flatten().isnan()
    assert torch.equal(rounded.codes.cpu()[sound], expected.codes[sound])
    assert torch.equal(rounded.zeros.cpu()[sound], expected.zeros[sound])
    torch.testing.assert_close(rounded.scales.cpu(), expected.scales, rtol=0, atol=0, equal_nan=True)


def test_cuda_rows_of_more_dimensions_and_none_of_rounded() -> None:
    weight = on_device(weight_of("each row", 33, 64))
    product = CudaInt8(weight)
    layer = packed_layer(product, weight)
    x = torch.randn(2, 3, 64, device=DEVICE)
    assert torch.equal(product.multiply(x, layer, None).flatten(0, 1), product.multiply(x.flatten(0, 1), layer, None))
    assert product.multiply(x[:0], layer, None).shape == (0, 3, 33)


def test_cuda_choice_of_rounded_rows() -> None:
    weight = on_device(weight_of("each row", 33, 64))
    assert isinstance(choose_product(weight, Target("cuda", torch.bfloat16)), CudaInt8)
    assert not isinstance(choose_product(weight._replace(rounding=None), Target("cuda", torch.bfloat16)), CudaInt8)
