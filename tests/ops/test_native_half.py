"""Norm, rotary embedding and gate in half precision: conversions bit for bit, results to a rounding of float64's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cpu.native import library
from vllm_gaudi_ucm.ops.rms_norm.impl.cpu.norm import rms_norm
from vllm_gaudi_ucm.ops.rotary.impl.cpu.rotary import can_rotate, rotate
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cpu.gate import silu_and_mul

needs_kernels = pytest.mark.skipif(library.native() is None, reason=library.why_not_native())
pytestmark = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def within_roundings(found: Tensor, expected: Tensor, dtype: torch.dtype, roundings: float = 1.0) -> None:
    """expected: float64. One rounding is half of the distance to the next number, and a little for fp32 below it."""
    info = torch.finfo(dtype)
    assert found.isfinite().all()
    room = (roundings * 0.51 * info.eps) * expected.abs() + info.smallest_normal * info.eps
    assert ((found.double() - expected).abs() <= room).all()


@needs_kernels
def test_every_sum_is_rounded_as_by_torch(dtype: torch.dtype) -> None:
    """All numbers of the dtype, as they are and plus a smaller one: ties, denormal ones, infinity, NaN."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    torch.manual_seed(0)
    for other in (torch.zeros_like(every), every.float().mul(torch.randn(256, 256) / 200).to(dtype), every):
        expected = (every.float() + other.float()).to(dtype)
        residual = other.clone()
        rms_norm(every.clone(), None, 1e-5, residual)
        assert torch.equal(residual.isnan(), expected.isnan())
        assert torch.equal(bits(residual)[~residual.isnan()], bits(expected)[~expected.isnan()])


@pytest.mark.parametrize(("rows", "size"), [(0, 64), (1, 576), (3, 1), (5, 67), (200, 192)])
@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_kernels), False])
def test_norm(dtype: torch.dtype, rows: int, size: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is not rounded for the norm; the norm is before it is weighted."""
    if not native:
        monkeypatch.setattr(library, "_outcome", library._Outcome(None, "none in this test"))
    torch.manual_seed(size)
    x, residual = torch.randn(rows, 2 * size).to(dtype)[:, :size], torch.randn(rows, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    total = x.double() + residual.double()
    exact = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    found = rms_norm(x.clone(), weight, 1e-5, residual)
    assert torch.equal(residual, total.float().to(dtype))
    within_roundings(found, exact * weight.double(), dtype, 2)
    alone = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    within_roundings(rms_norm(x, None, 1e-5), alone, dtype)


@needs_kernels
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1536), (7, 1), (3, 67), (50, 1000)])
def test_gate(dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(size)
    x = (8 * torch.randn(rows, 2 * size + 5)).to(dtype)[:, : 2 * size]
    gate, value = x.double().split(size, -1)
    within_roundings(silu_and_mul(x), gate / (1 + (-gate).exp()) * value, dtype)


@needs_kernels
@pytest.mark.parametrize(("head_size", "rotary_size"), [(64, 64), (20, 12)])
def test_rotation(dtype: torch.dtype, head_size: int, rotary_size: int) -> None:
    """Query and key lie in one row, as a merged projection leaves them; what lies beside them stays."""
    torch.manual_seed(head_size)
    merged = torch.randn(7, 6 * head_size).to(dtype)
    before = merged.clone()
    query, key, rest = merged.split([3 * head_size, 2 * head_size, head_size], -1)
    turns = torch.arange(50)[:, None] * 0.3 ** torch.arange(rotary_size // 2)
    table, positions = torch.cat((turns.cos(), turns.sin()), 1).to(dtype), torch.randint(0, 50, (7,))
    half = rotary_size // 2
    assert can_rotate(query, key, positions, table)
    assert not can_rotate(query, key, positions, table.float())
    rotate(query, key, positions, table, head_size)
    heads = before[:, : 5 * head_size].double().unflatten(1, (-1, head_size))
    cosine, sine = table.double()[positions][:, None].split(half, -1)
    a, b = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
    heads[..., :half], heads[..., half : 2 * half] = a * cosine - b * sine, b * cosine + a * sine
    found = merged[:, : 5 * head_size].double().unflatten(1, (-1, head_size))
    # what two products leave of each other may be small beside their roundings in fp32
    assert ((found - heads).abs() <= 0.51 * torch.finfo(dtype).eps * heads.abs() + 1e-6).all()
    assert torch.equal(rest, before[:, 5 * head_size :])
    with pytest.raises(IndexError, match="position 50"):
        rotate(query, key, torch.full((7,), 50), table, head_size)
