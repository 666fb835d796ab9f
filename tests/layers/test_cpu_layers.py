"""Our CPU layers against vLLM's own computation, through vLLM's registry, and their fallbacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from vllm_gaudi_ucm.layers.cpu.layers import (
    FusedGemmaRMSNorm,
    FusedRMSNorm,
    FusedSiluAndMul,
    StepRotaryEmbedding,
    register_cpu_layers,
)
from vllm_gaudi_ucm.ops.cpu.native import library

HIDDEN, HEAD, HEADS = 96, 16, 3
# Both compute the same few dozen roundings in another order.
TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}


@pytest.fixture(autouse=True)
def config() -> Iterator[VllmConfig]:
    register_cpu_layers()
    found = VllmConfig()
    with set_current_vllm_config(found):
        yield found


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_outcome", library._Outcome(None, "none in this test"))


def make_norm(dtype: torch.dtype = torch.float32, **options: object) -> RMSNorm:
    norm = RMSNorm(HIDDEN, eps=1e-5, dtype=dtype, **options)
    norm.weight.data.normal_()
    return norm


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("has_weight", [True, False])
def test_norm(rows: int, has_weight: bool) -> None:
    norm = make_norm(has_weight=has_weight)
    assert type(norm) is FusedRMSNorm
    x, residual = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
    torch.testing.assert_close(norm.forward_oot(x), norm.forward_native(x), **TOLERANCE)
    expected = norm.forward_native(x.clone(), residual.clone())
    for found, wanted in zip(norm.forward_oot(x, residual), expected, strict=True):
        torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_norm_in_half_precision_is_vllms_own() -> None:
    norm = make_norm(torch.bfloat16)
    x, residual = torch.randn(5, HIDDEN).bfloat16(), torch.randn(5, HIDDEN).bfloat16()
    found = norm.forward_oot(x.clone(), residual.clone())
    expected = norm.forward_native(x.clone(), residual.clone())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def make_gemma_norm(dtype: torch.dtype = torch.float32) -> GemmaRMSNorm:
    norm = GemmaRMSNorm(HIDDEN, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    return norm


@pytest.mark.parametrize("shape", [(0, HIDDEN), (7, HIDDEN), (5, 3, HIDDEN)])
def test_gemmas_norm_writes_to_nothing(shape: tuple[int, ...]) -> None:
    norm = make_gemma_norm()
    assert type(norm) is FusedGemmaRMSNorm
    x, residual = torch.randn(shape), torch.randn(shape)
    given = x.clone(), residual.clone()
    torch.testing.assert_close(norm.forward_oot(x), norm.forward_native(x), **TOLERANCE)
    expected = norm.forward_native(x, residual)
    for found, wanted in zip(norm.forward_oot(x, residual), expected, strict=True):
        torch.testing.assert_close(found, wanted, **TOLERANCE)
    assert torch.equal(x, given[0])
    assert torch.equal(residual, given[1])


def test_gemmas_norm_of_some_columns() -> None:
    """Queries and keys as they lie in the product of all three."""
    norm, product = make_gemma_norm(), torch.randn(4, 5 * HIDDEN)
    heads = product[:, HIDDEN : 3 * HIDDEN].unflatten(-1, (2, HIDDEN))
    torch.testing.assert_close(norm.forward_oot(heads), norm.forward_native(heads), **TOLERANCE)


def test_gemmas_norm_in_half_precision_is_vllms_own() -> None:
    norm = make_gemma_norm(torch.bfloat16)
    x, residual = torch.randn(5, HIDDEN).bfloat16(), torch.randn(5, HIDDEN).bfloat16()
    found, expected = norm.forward_oot(x, residual), norm.forward_native(x, residual)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def make_rotary(neox: bool = True, rotary_dim: int = HEAD) -> RotaryEmbedding:
    return RotaryEmbedding(HEAD, rotary_dim, 64, 10_000.0, neox, torch.float32)


def heads(rows: int, count: int) -> torch.Tensor:
    return torch.randn(rows, count * HEAD)


@pytest.mark.parametrize(("neox", "rotary_dim"), [(True, HEAD), (False, HEAD), (True, HEAD // 2)])
def test_rotary(config: VllmConfig, neox: bool, rotary_dim: int) -> None:
    rotary = make_rotary(neox, rotary_dim)
    assert type(rotary) is StepRotaryEmbedding
    positions, query, key = torch.tensor([0, 5, 63, 5]), heads(4, HEADS), heads(4, 1)
    expected = rotary.forward_native(positions, query.clone(), key.clone())
    with set_forward_context(None, config):
        alone = rotary.forward_oot(positions, query.clone(), None)
        found = rotary.forward_oot(positions, query, key)
    assert alone[1] is None
    torch.testing.assert_close(alone[0], expected[0], **TOLERANCE)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


def test_angles_belong_to_a_step(config: VllmConfig, without_kernels: None) -> None:
    """The same buffer holds other positions in the next step. covers: A9"""
    rotary = make_rotary()
    positions, query, key = torch.tensor([1, 2]), heads(2, HEADS), heads(2, 1)
    with set_forward_context(None, config):
        first = rotary.forward_oot(positions, query, key)[0]
        assert torch.equal(rotary.forward_oot(positions, query, key)[0], first)
    positions.copy_(torch.tensor([30, 40]))
    with set_forward_context(None, config):
        second = rotary.forward_oot(positions, query, key)[0]
    torch.testing.assert_close(second, rotary.forward_native(positions, query, key)[0], **TOLERANCE)
    assert not torch.allclose(second, first)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_gated_activation(rows: int) -> None:
    layer = SiluAndMul()
    assert type(layer) is FusedSiluAndMul
    x = 10 * torch.randn(rows, 2 * HIDDEN)
    torch.testing.assert_close(layer.forward_oot(x), layer.forward_native(x), **TOLERANCE)


def test_layers_compute_the_same_without_native_kernels(config: VllmConfig, without_kernels: None) -> None:
    """A machine without a compiler gives the same model."""
    x, residual = torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    norm = make_norm()
    expected = norm.forward_native(x.clone(), residual.clone())
    for found, wanted in zip(norm.forward_oot(x.clone(), residual.clone()), expected, strict=True):
        torch.testing.assert_close(found, wanted, **TOLERANCE)
    gemma = make_gemma_norm()
    torch.testing.assert_close(gemma.forward_oot(x), gemma.forward_native(x), **TOLERANCE)
    gated = torch.randn(5, 2 * HIDDEN)
    torch.testing.assert_close(SiluAndMul().forward_oot(gated), SiluAndMul.forward_native(gated), **TOLERANCE)
