"""RMSNorm, rotary embedding and gated activation against float64, with and without native kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cpu.native import library
from vllm_gaudi_ucm.ops.rms_norm.impl.cpu.norm import rms_norm
from vllm_gaudi_ucm.ops.rotary.impl.cpu.rotary import can_rotate, rotate
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cpu.gate import silu_and_mul

EPSILON = torch.finfo(torch.float32).eps
needs_kernels = pytest.mark.skipif(library.native() is None, reason=library.why_not_native())


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(library, "_outcome", library._Outcome(None, "none in this test"))
    elif library.native() is None:
        pytest.skip(library.why_not_native())


def exact_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    x = x.double()
    scaled = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return scaled if weight is None else scaled * weight.double()


@pytest.mark.parametrize(("rows", "size"), [(0, 64), (1, 576), (3, 1), (5, 67), (200, 192)])
@pytest.mark.parametrize("weighted", [True, False])
def test_norm(kernels: None, rows: int, size: int, weighted: bool) -> None:
    torch.manual_seed(size)
    x, residual = torch.randn(rows, 2 * size)[:, :size], torch.randn(rows, size)
    weight = torch.randn(size) if weighted else None
    # A mean of squares has a relative error of at most (size + 2) eps, its root half of that; four more roundings.
    tolerance = {"rtol": (size / 2 + 8) * EPSILON, "atol": 0.0}
    expected = exact_norm(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, **tolerance)
    total = x + residual
    found = rms_norm(x.clone(), weight, 1e-5, residual)
    assert torch.equal(residual, total), "the sum is left in the residual"
    torch.testing.assert_close(found.double(), exact_norm(total, weight, 1e-5), **tolerance)


def test_norm_of_heads_and_of_half_precision(kernels: None) -> None:
    heads = torch.randn(4, 3, 16)
    torch.testing.assert_close(rms_norm(heads, None, 0.0).double(), exact_norm(heads, None, 0.0), rtol=1e-5, atol=0)
    half = torch.randn(4, 16).bfloat16()
    assert rms_norm(half, None, 1e-5).dtype == torch.bfloat16


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_stays_alone(kernels: None, bad: float) -> None:
    """covers: D8. A broken request stays visible and breaks no other."""
    x = torch.randn(3, 64)
    x[1, 5] = bad
    for found in (rms_norm(x, None, 1e-5), silu_and_mul(x)):
        assert not found[1].isfinite().all()
        assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1536), (7, 1), (3, 67), (50, 1000)])
def test_gate(kernels: None, rows: int, size: int) -> None:
    torch.manual_seed(size)
    x = 8 * torch.randn(rows, 2 * size + 5)[:, : 2 * size]
    gate, value = x.double().split(size, -1)
    expected = gate / (1 + (-gate).exp()) * value
    torch.testing.assert_close(silu_and_mul(x).double(), expected, rtol=8 * EPSILON, atol=1e-30)


def test_gates_of_extreme_size(kernels: None) -> None:
    """e^-x overflows where the gate is almost closed."""
    gate = torch.tensor([[-1e30, -200.0, -100.0, -88.5, -87.0, -0.0, 0.0, 1e-30, 87.0, 100.0, 1e30]])
    found = silu_and_mul(torch.cat((gate, torch.ones_like(gate)), 1))
    expected = gate.double() / (1 + (-gate.double()).exp())
    torch.testing.assert_close(found.double(), expected, rtol=8 * EPSILON, atol=1e-6)


def angles(positions: int, size: int) -> Tensor:
    turns = torch.arange(positions)[:, None] * 0.3 ** torch.arange(size // 2)
    return torch.cat((turns.cos(), turns.sin()), 1)


def exact_rotation(x: Tensor, positions: Tensor, table: Tensor, head_size: int) -> Tensor:
    half = table.shape[1] // 2
    heads = x.double().unflatten(1, (-1, head_size)).clone()
    cosine, sine = table.double()[positions][:, None].split(half, -1)
    a, b = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
    heads[..., :half], heads[..., half : 2 * half] = a * cosine - b * sine, b * cosine + a * sine
    return heads.flatten(1)


@needs_kernels
@pytest.mark.parametrize(("head_size", "rotary_size"), [(64, 64), (64, 32), (20, 12), (128, 128)])
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_rotation_of_views(head_size: int, rotary_size: int, rows: int) -> None:
    """Query and key lie in one row, as a merged projection leaves them; what lies beside them stays."""
    torch.manual_seed(rows)
    merged = torch.randn(rows, 6 * head_size)
    before = merged.clone()
    query, key, rest = merged.split([3 * head_size, 2 * head_size, head_size], -1)
    positions, table = torch.randint(0, 50, (rows,)), angles(50, rotary_size)
    expected = [exact_rotation(x, positions, table, head_size) for x in (query, key)]
    assert can_rotate(query, key, positions, table)
    rotate(query, key, positions, table, head_size)
    for found, wanted in zip((query, key), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=16 * EPSILON)
    assert torch.equal(rest, before[:, 5 * head_size :])


@needs_kernels
@pytest.mark.parametrize("position", [-1, 50])
def test_a_position_without_angles_is_named(position: int) -> None:
    """covers: A10. Nothing is read from beyond the table, and nothing is half rotated."""
    query, key = torch.ones(2, 8), torch.ones(2, 8)
    with pytest.raises(IndexError, match=rf"row 1 has position {position}, expected one from 0 to 49"):
        rotate(query, key, torch.tensor([3, position]), angles(50, 8), 8)
    assert (query == 1).all()


def test_what_is_not_rotated_here() -> None:
    query, key, positions, table = torch.ones(2, 8), torch.ones(2, 8), torch.tensor([0, 1]), angles(4, 8)
    assert not can_rotate(query.bfloat16(), key.bfloat16(), positions, table)
    assert not can_rotate(query, key, positions.expand(3, 2), table)
    assert not can_rotate(query.view(2, 1, 8), key, positions, table)
    assert not can_rotate(query, key, positions[:1], table), "nothing is read from beyond a tensor"


def test_a_weight_of_another_size_raises(kernels: None) -> None:
    """Nothing is read from beyond it."""
    with pytest.raises(RuntimeError):
        rms_norm(torch.ones(2, 64), torch.ones(32), 1e-5)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_results_have_the_dtype_of_what_goes_in(default: torch.dtype, kernels: None) -> None:
    """Whatever torch's default is: the kernels write float32."""
    x = torch.randn(3, 64)
    norm, gate = rms_norm(x, None, 1e-5), silu_and_mul(x)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = rms_norm(x, None, 1e-5), silu_and_mul(x)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found[0], norm)
    assert torch.equal(found[1], gate)
