"""Our layers for Gaudi against float64, with vLLM's own forward as the measure, by fused operators and without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import llama3_rope, yarn_scaling_rope
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from tests.ops.gaudi_kernels import KERNELS, gaudi_software, rms_norm, rotary
from vllm_gaudi_ucm.layers.hpu import layers as gaudi_layers
from vllm_gaudi_ucm.layers.hpu.layers import (
    LAYERS,
    GaudiGeluAndMulSparse,
    GaudiGemmaRMSNorm,
    GaudiLlama3RotaryEmbedding,
    GaudiRMSNorm,
    GaudiRotaryEmbedding,
    GaudiYaRNScalingRotaryEmbedding,
    register_gaudi_layers,
)
from vllm_gaudi_ucm_tools.buckets.compile_cost import LAYER_NODES
from vllm_gaudi_ucm_tools.op_cost.operator_cost import trace

HIDDEN, HEAD, HEADS, KV_HEADS, POSITIONS = 96, 16, 3, 1, 64
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without layers that another test has registered."""
    for layer in (*LAYERS, SiluAndMul):
        monkeypatch.delitem(gaudi_layers.op_registry_oot, layer.__name__, raising=False)
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture(params=["fused", "torch"])
def software(request: pytest.FixtureRequest) -> Iterator[dict[str, int]]:
    """Calls of each operator; all zeros where the software has none."""
    calls = {"rms_norm": 0, "rotary": 0}

    def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return kernel(*args)

        return call

    kernels = {schema: counted(kernel.__name__, kernel) for schema, kernel in KERNELS.items()}
    with gaudi_software(kernels) if request.param == "fused" else contextlib.nullcontext():
        calls["fused"] = int(request.param == "fused")
        yield calls


def assert_as_good(found: Tensor, reference: Tensor, exact: Tensor) -> None:
    """Finite, of the same kind, and off by at most twice what vLLM's forward is, and half an ulp of the largest."""
    assert found.isfinite().all()
    assert (found.dtype, found.shape) == (reference.dtype, reference.shape)
    band = torch.finfo(found.dtype).eps / 2 * exact.abs().max()
    budget = 2 * ((reference.double() - exact).abs().max() + band)
    assert (found.double() - exact).abs().max() <= budget


def exact_norm(x: Tensor, weight: Tensor | None, epsilon: float, size: int | None = None) -> Tensor:
    x = x.double()
    norm = x / (x[..., :size].pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    return norm if weight is None else norm * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, HIDDEN), (1, HIDDEN), (7, HIDDEN), (5, HEADS, HIDDEN)])
@pytest.mark.parametrize("options", [{}, {"has_weight": False}, {"var_hidden_size": HIDDEN // 2}])
def test_norm(software: dict[str, int], dtype: torch.dtype, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    norm = GaudiRMSNorm(HIDDEN, eps=1e-5, dtype=dtype, **options)
    norm.weight.data.normal_()
    x, residual = (3 * torch.randn(shape).to(dtype) for _ in range(2))
    weight = norm.weight if norm.has_weight else None
    before = x.clone(), residual.clone()
    alone, (together, total) = norm.forward_oot(x), norm.forward_oot(x, residual)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1]), "an input of a region is not written"
    assert software["rms_norm"] == (2 if software["fused"] and not options else 0)
    if not alone.numel():
        assert alone.shape == together.shape == total.shape == shape
        return
    size = options.get("var_hidden_size")
    assert_as_good(alone, norm.forward_native(x), exact_norm(x, weight, 1e-5, size))
    reference, reference_total = norm.forward_native(x.clone(), residual.clone())
    exact_total = x.double() + residual.double()
    assert_as_good(together, reference, exact_norm(exact_total, weight, 1e-5, size))
    assert_as_good(total, reference_total, exact_total)


def test_norm_of_parts_of_a_row(software: dict[str, int]) -> None:
    """Heads of a query lie apart in the product that they are split from."""
    norm = GaudiRMSNorm(HEAD, dtype=torch.bfloat16)
    heads = torch.randn(5, HIDDEN).bfloat16()[:, : HEADS * HEAD].unflatten(-1, (HEADS, HEAD))
    assert_as_good(norm.forward_oot(heads), norm.forward_native(heads), exact_norm(heads, norm.weight, 1e-6))


def test_a_weight_of_another_dtype_takes_torchs_form(software: dict[str, int]) -> None:
    norm = GaudiRMSNorm(HIDDEN, dtype=torch.float32)
    x = torch.randn(5, HIDDEN).bfloat16()
    assert_as_good(norm.forward_oot(x), norm.forward_native(x), exact_norm(x, norm.weight, 1e-6))
    assert software["rms_norm"] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_norm(software: dict[str, int], dtype: torch.dtype) -> None:
    norm = GaudiGemmaRMSNorm(HIDDEN).to(dtype)
    norm.weight.data.normal_()
    x, residual = (torch.randn(5, HIDDEN).to(dtype) for _ in range(2))
    assert_as_good(norm.forward_oot(x), norm.forward_native(x), exact_norm(x, 1 + norm.weight.double(), 1e-6))
    found, total = norm.forward_oot(x, residual)
    reference, reference_total = norm.forward_native(x.clone(), residual.clone())
    exact = x.double() + residual.double()
    assert_as_good(found, reference, exact_norm(exact, 1 + norm.weight.double(), 1e-6))
    assert_as_good(total, reference_total, exact)
    assert software["rms_norm"] == 2 * software["fused"]


def rotary_layers(neox: bool, width: int, dtype: torch.dtype) -> Iterator[RotaryEmbedding]:
    first = HEAD, width, POSITIONS, 10_000.0, neox
    yield GaudiRotaryEmbedding(*first, dtype)
    yield GaudiLlama3RotaryEmbedding(*first, dtype, 8.0, 1.0, 4.0, 32)
    yield GaudiYaRNScalingRotaryEmbedding(*first, 4.0, dtype)


def exact_rotation(x: Tensor, angles: Tensor, neox: bool) -> Tensor:
    """x: [tokens, heads * HEAD]; angles: [tokens, width], cosines before sines."""
    heads = x.double().unflatten(-1, (-1, HEAD))
    cos, sin = angles.double()[:, None].chunk(2, -1)
    width = angles.shape[-1]
    pairs = heads[..., :width].unflatten(-1, (2, -1) if neox else (-1, 2))
    axis = -2 if neox else -1
    a, b = pairs.unbind(axis)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), axis).flatten(-2)
    return torch.cat((turned, heads[..., width:]), -1).flatten(-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False], ids=["blockwise", "pairwise"])
@pytest.mark.parametrize("width", [HEAD, HEAD // 2])
def test_rotary(software: dict[str, int], dtype: torch.dtype, neox: bool, width: int) -> None:
    """Whole heads and parts of them; without a key, as layers that share one have it."""
    positions = torch.tensor([0, 5, 63, 5])
    joined = torch.randn(4, (HEADS + 2 * KV_HEADS) * HEAD).to(dtype)
    query, key, _ = joined.split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], -1)
    for layer in rotary_layers(neox, width, dtype):
        angles = layer.cos_sin_cache[positions]
        expected = layer.forward_native(positions, query, key)
        found = layer.forward_oot(positions, query, key)
        alone = layer.forward_oot(positions, query)
        assert alone[1] is None
        assert torch.equal(alone[0], found[0])
        for one, reference, x in zip(found, expected, (query, key), strict=True):
            assert reference is not None
            assert_as_good(one, reference, exact_rotation(x, angles, neox))
    assert software["rotary"] == 9 * software["fused"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_angles_of_another_dtype_do_not_change_the_results(software: dict[str, int], dtype: torch.dtype) -> None:
    """One float32 argument would make the operator return float32."""
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    layer = GaudiRotaryEmbedding(HEAD, HEAD, POSITIONS, 10_000.0, True, other)
    query = torch.randn(4, HEADS * HEAD).to(dtype)
    assert layer.forward_oot(torch.arange(4), query)[0].dtype == dtype


def test_vllm_makes_our_layers(software: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    register_gaudi_layers()
    register_gaudi_layers()
    assert type(RMSNorm(HIDDEN)) is GaudiRMSNorm
    assert type(GemmaRMSNorm(HIDDEN)) is GaudiGemmaRMSNorm
    assert type(RotaryEmbedding(HEAD, HEAD, POSITIONS, 1e4, True, torch.float32)) is GaudiRotaryEmbedding
    llama3 = llama3_rope.Llama3RotaryEmbedding(HEAD, HEAD, POSITIONS, 1e4, True, torch.float32, 8.0, 1.0, 4.0, 32)
    assert type(llama3) is GaudiLlama3RotaryEmbedding
    yarn = yarn_scaling_rope.YaRNScalingRotaryEmbedding(HEAD, HEAD, POSITIONS, 1e4, True, 4.0, torch.float32)
    assert type(yarn) is GaudiYaRNScalingRotaryEmbedding


class Decoder(nn.Module):
    """The layers of a decoder layer around its attention, as vLLM's models call them."""

    def __init__(self, rotary_embedding: RotaryEmbedding) -> None:
        super().__init__()
        self.first, self.second = (GaudiRMSNorm(HIDDEN, dtype=torch.bfloat16) for _ in range(2))
        self.of_queries = GaudiRMSNorm(HEAD, dtype=torch.bfloat16)
        self.rotary = rotary_embedding
        self.product = nn.Linear(HIDDEN, (HEADS + KV_HEADS) * HEAD, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False, dtype=torch.bfloat16)
        self.back = nn.Linear(HEADS * HEAD, HIDDEN, bias=False, dtype=torch.bfloat16)
        self.gate = SiluAndMul()

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        hidden, residual = self.first(hidden, residual)
        query, key = self.product(hidden).split([HEADS * HEAD, KV_HEADS * HEAD], -1)
        query = self.of_queries(query.unflatten(-1, (HEADS, HEAD))).flatten(-2)
        query, key = self.rotary(positions, query, key)
        hidden, residual = self.second(self.back(query * key.sum()), residual)
        return self.gate(self.up(hidden)), residual


def test_one_trace_for_all_layers(software: dict[str, int]) -> None:
    """Without a break, and nothing in it is a vLLM operator, which Gaudi would run outside of its graph."""
    shared = GaudiRotaryEmbedding(HEAD, HEAD // 2, POSITIONS, 1e4, True, torch.bfloat16)
    layers = [Decoder(shared).requires_grad_(False) for _ in range(4)]
    traced: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        traced.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(Decoder.forward, backend=backend, fullgraph=True, dynamic=False)
    positions, hidden = torch.arange(6), torch.randn(6, HIDDEN).bfloat16()
    for layer in layers:
        residual = torch.randn(6, HIDDEN).bfloat16()
        found = compiled(layer, positions, hidden, residual)
        for one, expected in zip(found, layer(positions, hidden, residual), strict=True):
            assert torch.equal(one, expected)
    assert len(traced) == 1
    names = traced[0]
    assert not [name for name in names if "vllm" in name]
    fused = software["fused"]
    assert sum("rms_norm" in name for name in names) == 3 * fused
    assert sum("rotary_pos_embedding" in name for name in names) == 2 * fused


def test_a_layer_has_no_more_nodes_than_its_modelled_compilation(software: dict[str, int]) -> None:
    """Beside these are a product, and the two writes of keys and values."""
    layer = Decoder(GaudiRotaryEmbedding(HEAD, HEAD, POSITIONS, 1e4, True, torch.bfloat16)).requires_grad_(False)
    hidden = torch.randn(6, HIDDEN).bfloat16()
    found = trace(layer, torch.arange(6), hidden, hidden.clone())
    assert 10 < len(found.operations) + 3 <= LAYER_NODES


def test_the_kernels_of_the_tests_are_the_operators() -> None:
    """They stand for what the card computes, so they are held to float64 as well."""
    x, gamma = torch.randn(1, 5, HIDDEN), torch.randn(HIDDEN)
    torch.testing.assert_close(rms_norm(x, gamma, 1e-5)[0].double(), exact_norm(x, gamma, 1e-5), rtol=1e-5, atol=1e-6)
    angles = torch.randn(4, HEAD // 2)
    cos, sin = (torch.cat((angle.cos(), angle.cos()), -1)[:, None] for angle in (angles, angles - torch.pi / 2))
    heads = torch.randn(4, HEADS, HEAD)
    exact = exact_rotation(heads.flatten(1), torch.cat((angles.cos(), angles.sin()), -1), True)
    torch.testing.assert_close(rotary(heads, sin, cos, None, 0, 0).flatten(1).double(), exact, rtol=1e-5, atol=1e-5)


def test_the_threshold_of_a_sparse_gate_is_computed_on_the_host() -> None:
    """A device with no numbers shows it: vLLM's own layer cannot be built there."""
    with torch.device("meta"):
        gate = GaudiGeluAndMulSparse(0.95, approximate="tanh")
    assert gate.std_multiplier == pytest.approx(1.6448536)
