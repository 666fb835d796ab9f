"""The CUDA kernel of quantised linear layers against float64.

On a GPU, or on a CPU in the process of test_interpreter.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.cuda_quantised import DEVICE, E4M3, GPU, on_device
from tests.ops.oracle import CUDA_RUNS
from tests.ops.quantised import exact, packed_layer, random_weight
from vllm_gaudi_ucm.ops.quantised_linear.api import Target, choose_product
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda import codes as cuda
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.codes import CudaCodes, CudaFp8, narrow_rows
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.tiles import LinearTiles, tiles_of
from vllm_gaudi_ucm.ops.quantised_linear.weight import dequantise

pytestmark = pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")
WEIGHTS = {
    "fp8 per channel": random_weight(40, 96, (1, 96), E4M3),
    "fp8 per block": random_weight(40, 128, (32, 64), E4M3),
    "int8": random_weight(33, 64, (1, 64), torch.int8),
    "4 bits in groups": random_weight(40, 128, (1, 32), torch.uint8, bits=4),
    "4 bits per channel": random_weight(24, 128, (1, 128), torch.uint8, bits=4),
    "8 bits in groups": random_weight(24, 64, (1, 32), torch.uint8, bits=8),
    "mxfp4": random_weight(24, 64, (1, 32), E4M3),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (19, 1), (19, 3)])
def test_cuda_codes(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, rows: int, splits: int) -> None:
    """Also where parts of the inputs are summed up by themselves, some of which may be empty. Codes are exact in the
    dtype of rows, so sums in float32 and one rounding are all.

    Rows lie within a larger tensor of NaN. Triton's interpreter cuts bf16 off where a GPU rounds.
    """
    weight = WEIGHTS[name]
    here = on_device(weight)
    assert CudaCodes.covers(here)
    product = CudaCodes(here)
    layer = packed_layer(product, here)
    if name.startswith("4 bits"):
        assert isinstance(layer.weight, Tensor)
        assert layer.weight.nbytes == weight.codes.numel() // 2
    monkeypatch.setattr(cuda, "tiles_of", lambda *_: LinearTiles(32, 32, splits))
    whole = torch.full((rows, weight.inputs + 8), torch.nan, dtype=dtype, device=DEVICE)
    x = whole[:, : weight.inputs]
    x.copy_(torch.randn(rows, weight.inputs))
    bias = torch.randn(weight.outputs).to(dtype)
    found = product.multiply(x, layer, bias.to(DEVICE)).cpu()
    assert found.shape == (rows, weight.outputs)
    assert found.isfinite().all()
    terms = x.cpu().double().abs() @ exact(weight).abs().T + bias.double().abs()
    oracle = x.cpu().double() @ exact(weight).T + bias.double()
    budget = terms * weight.inputs * torch.finfo(torch.float32).eps + oracle.abs() * torch.finfo(dtype).eps
    assert bool(((found.double() - oracle).abs() <= budget).all())


@pytest.mark.parametrize("name", WEIGHTS)
def test_cuda_many_rows(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The weight is written out as for a device without a product of its own, element by element."""
    monkeypatch.setattr(cuda, "MANY_ROWS", 3)
    here = on_device(WEIGHTS[name])
    product = CudaCodes(here)
    layer = packed_layer(product, here)
    written = product._written_out(layer, torch.float32)
    assert torch.equal(written, dequantise(here, torch.float32))
    x = torch.randn(2, 3, here.inputs, device=DEVICE).to(torch.bfloat16)
    bias = torch.randn(here.outputs, device=DEVICE).to(torch.bfloat16)
    found = product.multiply(x, layer, bias)
    oracle = x.cpu().double() @ exact(WEIGHTS[name]).T + bias.cpu().double()
    torch.testing.assert_close(found.cpu().double(), oracle, rtol=0.02, atol=0.02 * float(oracle.abs().amax()))


def test_cuda_few_rows_of_a_scaled_product() -> None:
    """They are not rounded."""
    weight = random_weight(32, 64, (1, 64), E4M3)
    product = CudaFp8(on_device(weight))
    layer = packed_layer(product, on_device(weight))
    x = torch.randn(5, 64, dtype=torch.float32, device=DEVICE)
    oracle = x.cpu().double() @ exact(weight).T
    torch.testing.assert_close(product.multiply(x, layer, None).cpu().double(), oracle, rtol=1e-5, atol=1e-4)


def test_cuda_tiles() -> None:
    """Layers of few outputs are split by inputs, so that there are programs for the whole device."""
    assert tiles_of(1, 14336, 32) == LinearTiles(16, 128, 8, 4, 3)
    assert tiles_of(16, 4096, 112).splits == 8
    assert tiles_of(64, 14336, 32) == LinearTiles(64, 64, 1, 4, 3)
    assert tiles_of(64, 4096, 112) == LinearTiles(64, 64, 4, 4, 4)
    assert tiles_of(200, 4096, 112) == LinearTiles(128, 128, 1, 8, 3)
    assert tiles_of(1, 64, 1).splits == 1


def test_cuda_rows_of_more_dimensions_and_none() -> None:
    weight = on_device(WEIGHTS["int8"])
    product = CudaCodes(weight)
    layer = packed_layer(product, weight)
    x = torch.randn(2, 3, 64, device=DEVICE)
    assert torch.equal(product.multiply(x, layer, None).flatten(0, 1), product.multiply(x.flatten(0, 1), layer, None))
    assert product.multiply(x[:0], layer, None).shape == (0, 3, 33)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cuda_narrow_rows(dtype: torch.dtype) -> None:
    """Numbers of e4m3 stay what they are, whatever their row's scale; zeros stay zeros; what is not finite spoils its
    own row. Triton's interpreter rounds other numbers, and NaN, unlike a GPU."""
    numbers = (torch.randn(6, 100) * 60).clamp(-448, 448).to(E4M3).to(dtype).to(DEVICE)
    numbers[:, 5], numbers[2] = 448, 0
    rows = (numbers * 2.0 ** torch.arange(-9, 3, 2, device=DEVICE).unsqueeze(1).to(dtype))[:, :90]
    rows[3, 7] = torch.nan
    narrow, scales = narrow_rows(rows)
    assert narrow.is_contiguous()
    sound = [0, 1, 2, 4, 5]
    assert torch.equal(narrow.to(dtype)[sound], numbers[sound, :90])
    torch.testing.assert_close(scales[sound] * 448, rows.float().amax(1, keepdim=True)[sound].clamp_min(448e-12))
    assert not GPU or bool(narrow.float()[3].isnan().any())
    assert narrow_rows(rows[:0])[0].shape == (0, 90)


def test_cuda_choice() -> None:
    """Groups that no power of two divides are written out."""
    odd = on_device(random_weight(24, 60, (1, 20), torch.int8))
    assert choose_product(odd, Target("cuda", torch.bfloat16)) is None
    scaled = choose_product(on_device(random_weight(32, 64, (1, 64), E4M3)), Target("cuda", torch.bfloat16))
    assert isinstance(scaled, CudaFp8 if GPU and torch.cuda.get_device_capability() >= (8, 9) else CudaCodes)
