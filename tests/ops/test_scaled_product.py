"""torch's scaled product with quantised weights, on a GPU that has 8-bit floats."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cuda_quantised import DEVICE, E4M3, GPU, on_device
from tests.ops.quantised import exact, packed_layer, random_weight
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda import codes as cuda
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.codes import CudaFp8


@pytest.mark.skipif(not GPU or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with 8-bit floats")
def test_scaled_product_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "FEW_ROWS", 0)
    weight = on_device(random_weight(32, 64, (1, 64), E4M3))
    product = CudaFp8(weight)
    x = torch.randn(5, 64, dtype=torch.bfloat16, device=DEVICE)
    found = product.multiply(x, packed_layer(product, weight), None)
    rows, meant = x.double(), exact(weight._replace(codes=weight.codes.cpu(), scales=weight.scales.cpu())).to(DEVICE)
    grid = rows.abs().amax(1, keepdim=True) * 2.0**-10 / 448
    budget = (rows.abs() * (2.0**-4 + 2.0**-7) + grid) @ meant.abs().T
    oracle = rows @ meant.T
    assert bool(((found.double() - oracle).abs() <= budget + oracle.abs() * 2.0**-8).all())
