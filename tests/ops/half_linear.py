"""Helpers of `test_half_linear.py` that other tests use, too."""

from __future__ import annotations

import torch
from torch import Tensor


def check(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """n fp32 additions of exact products (Higham, 3.1; twice, because pairs may be rounded after each one), and one
    rounding to the dtype. Numbers below the smallest normal one count as zero for some instructions."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    terms = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    info = torch.finfo(x.dtype)
    budget = 2 * (x.shape[1] + 1) * torch.finfo(torch.float32).eps * terms + 0.51 * info.eps * exact.abs()
    assert found.dtype == x.dtype
    assert found.isfinite().all()
    assert ((found.double() - exact).abs() <= budget + info.smallest_normal).all()


def problem(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that lie apart, a weight and a bias."""
    torch.manual_seed(rows + outputs)
    x = torch.randn(rows, inputs + 24).to(dtype)[:, 7 : 7 + inputs]
    return x, torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
