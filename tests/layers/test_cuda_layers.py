"""Our CUDA layers through vLLM's registry: what they launch for a decoder layer, and what they leave to torch.

Runs on a GPU, or on a CPU in the process of test_interpreter.py; the fallbacks run everywhere. The kernels' results are
held to float64 in tests/ops/test_cuda_elementwise.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.ir import enable_torch_wrap
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope, llama3_rope, yarn_scaling_rope
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from tests.ops.oracle import CUDA_RUNS
from vllm_gaudi_ucm.layers.cuda import layers as cuda_layers
from vllm_gaudi_ucm.layers.cuda.layers import (
    LAYERS,
    CudaGeluAndMul,
    CudaGemmaRMSNorm,
    CudaLlama3RotaryEmbedding,
    CudaRMSNorm,
    CudaRotaryEmbedding,
    CudaSiluAndMul,
    CudaYaRNScalingRotaryEmbedding,
    register_cuda_layers,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, HEAD, HEADS, KV_HEADS, INNER = 96, 16, 6, 2, 160
runs = pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without layers that another test has registered; ours, whether kernels can run here or not."""
    torch.manual_seed(0)
    before = dict(cuda_layers.op_registry_oot)
    cuda_layers.op_registry_oot.clear()
    monkeypatch.setattr(cuda_layers, "why_not_triton", lambda device: None)
    register_cuda_layers()
    yield
    cuda_layers.op_registry_oot.clear()
    cuda_layers.op_registry_oot.update(before)


@pytest.fixture(params=["all"])
def config(request: pytest.FixtureRequest) -> Iterator[VllmConfig]:
    """vLLM's `custom_ops`, separated by commas."""
    found = VllmConfig(compilation_config=CompilationConfig(custom_ops=request.param.split(",")))
    with set_current_vllm_config(found), torch.device(DEVICE):
        yield found


class DecoderLayer(nn.Module):
    """Qwen3's around its attention, as vLLM's model calls it: Llama's, with norms of each head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = (RMSNorm(HIDDEN, dtype=dtype) for _ in range(2))
        self.of_query, self.of_key = (RMSNorm(HEAD, dtype=dtype) for _ in range(2))
        self.rotary = RotaryEmbedding(HEAD, HEAD, 64, 10_000.0, True, dtype)
        self.sizes = [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD]
        self.joined = nn.Linear(HIDDEN, sum(self.sizes), bias=False, dtype=dtype)
        self.output = nn.Linear(HEADS * HEAD, HIDDEN, bias=False, dtype=dtype)
        self.up = nn.Linear(HIDDEN, 2 * INNER, bias=False, dtype=dtype)
        self.down = nn.Linear(INNER, HIDDEN, bias=False, dtype=dtype)
        self.gate = SiluAndMul()
        self.seen: tuple[Tensor, ...] = ()

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor, by_head: bool) -> tuple[Tensor, Tensor]:
        hidden, residual = self.first(hidden, residual)
        query, key, value = self.joined(hidden).split(self.sizes, -1)
        if by_head:
            query = self.of_query(query.view(*query.shape[:-1], HEADS, HEAD)).view(query.shape)
            key = self.of_key(key.view(*key.shape[:-1], KV_HEADS, HEAD)).view(key.shape)
        query, key = self.rotary(positions, query, key)
        # what vLLM's attention layer makes of them
        self.seen = tuple(x.view(-1, heads, HEAD) for x, heads in ((query, HEADS), (key, KV_HEADS), (value, KV_HEADS)))
        hidden, residual = self.second(self.output(self.seen[0].flatten(1)), residual)
        return self.down(self.gate(self.up(hidden))), residual


class Launched(TorchDispatchMode):
    """Operators of torch that compute or copy; views and allocations launch nothing."""

    FREE = ("empty", "detach", "view", "split", "slice", "transpose", "t.default", "alias", "unsqueeze", "expand")

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if not name.startswith(self.FREE) and "view" not in name:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def run(layer: DecoderLayer, rows: int, dtype: torch.dtype, by_head: bool) -> tuple[Counter[str], list[Tensor]]:
    positions = torch.arange(rows, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(1)
    hidden, residual = (torch.randn(rows, HIDDEN, device=DEVICE, generator=generator).to(dtype) for _ in range(2))
    with torch.no_grad(), enable_torch_wrap(False), Launched() as launched:
        found = layer(positions, hidden, residual, by_head)
    return launched.names, [*found, *layer.seen]


def counted_kernels(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches of our kernels, and they run."""
    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        plain = getattr(cuda_layers, name)

        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            with torch.utils._python_dispatch._disable_current_modes():  # what the interpreter does is no launch
                return plain(*args, **options)

        monkeypatch.setattr(cuda_layers, name, call)

    for name in ("cuda_rms_norm", "cuda_rotate", "cuda_gate"):
        count(name)
    return calls


@runs
@pytest.mark.parametrize("by_head", [False, True], ids=["llama", "qwen3"])
def test_cuda_launches_of_a_decoder_layer(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, by_head: bool) -> None:
    """Four products and four kernels of ours, two more for norms of heads: nothing is copied, cast or joined."""
    layer = DecoderLayer(torch.bfloat16)
    calls = counted_kernels(monkeypatch)
    operators, found = run(layer, 3, torch.bfloat16, by_head)
    assert sum(operators.values()) == operators["mm.default"] == 4
    assert calls == {"cuda_rms_norm": 4 if by_head else 2, "cuda_rotate": 1, "cuda_gate": 1}
    assert all(tensor.isfinite().all() for tensor in found)
    if not by_head:
        ends = {tensor.untyped_storage().data_ptr() for tensor in layer.seen}
        assert len(ends) == 1, "query and key are rotated where the product left them, beside the value"


@pytest.mark.parametrize("config", ["none"], indirect=True)
def test_operators_of_a_decoder_layer_without_them(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's `custom_ops` of none switches all of them off: what the layer launches then."""
    layer = DecoderLayer(torch.bfloat16)
    calls = counted_kernels(monkeypatch)
    operators, _ = run(layer, 3, torch.bfloat16, by_head=False)
    assert not calls
    assert type(layer.first) is CudaRMSNorm
    assert operators["mm.default"] == 4
    assert sum(operators.values()) == 45


@pytest.mark.parametrize("config", ["all,-RMSNorm"], indirect=True)
def test_one_kind_of_layer_is_switched_off_by_its_class(config: VllmConfig) -> None:
    """vLLM names a layer from outside of its tree by its class."""
    assert (RMSNorm.enabled(), RMSNorm(HIDDEN).enabled(), SiluAndMul().enabled()) == (True, False, True)


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_layers_compute_what_vllms_own_do(config: VllmConfig, dtype: torch.dtype) -> None:
    """The whole layer, against the same one by torch's operators in float64."""
    layer = DecoderLayer(dtype)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=1 / HIDDEN**0.5 if weight.dim() > 1 else 1)
    exact = DecoderLayer(torch.float64)
    exact.load_state_dict({name: weight.double() for name, weight in layer.state_dict().items()})
    exact.rotary.cos_sin_cache = layer.rotary.cos_sin_cache.double()
    for found, wanted in zip(run(layer, 5, dtype, True)[1], run(exact, 5, torch.float64, True)[1], strict=True):
        assert found.isfinite().all()
        # inputs are of order one, and no more than eight roundings follow each other
        assert (found.double() - wanted).abs().max() <= 8 * torch.finfo(dtype).eps * max(1, wanted.abs().max())


@runs
def test_cuda_norms_write_where_vllms_do(config: VllmConfig) -> None:
    """RMSNorm writes to both, and Gemma's to neither; without a residual nothing is written."""
    for norm, in_place in ((RMSNorm(HIDDEN), True), (GemmaRMSNorm(HIDDEN), False)):
        x, residual = torch.randn(2, 3, HIDDEN, device=DEVICE).unbind()
        before = x.clone(), residual.clone()
        assert norm(x).data_ptr() != x.data_ptr()
        assert torch.equal(x, before[0])
        found, total = norm(x, residual)
        assert torch.equal(total, before[0] + before[1])
        assert (found.data_ptr() == x.data_ptr(), total.data_ptr() == residual.data_ptr()) == (in_place, in_place)
        assert in_place or (torch.equal(x, before[0]) and torch.equal(residual, before[1]))


@runs
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_cuda_gelu_is_of_the_form_that_was_asked_for(config: VllmConfig, approximate: str) -> None:
    """The two differ by 5e-4 at most, which float32 tells apart."""
    layer, x = GeluAndMul(approximate), 3 * torch.randn(5, 64, device=DEVICE)
    torch.testing.assert_close(layer(x), GeluAndMul.forward_native(layer, x), rtol=1e-5, atol=1e-6)


def test_vllm_makes_our_layers(config: VllmConfig) -> None:
    register_cuda_layers()
    first = HEAD, HEAD, 64, 1e4, True
    assert type(RMSNorm(HIDDEN)) is CudaRMSNorm
    assert type(GemmaRMSNorm(HIDDEN)) is CudaGemmaRMSNorm
    assert type(SiluAndMul()) is CudaSiluAndMul
    assert type(GeluAndMul()) is CudaGeluAndMul
    assert type(get_rope(HEAD, 64)) is CudaRotaryEmbedding
    llama3 = llama3_rope.Llama3RotaryEmbedding(*first, torch.float32, 8.0, 1.0, 4.0, 32)
    assert type(llama3) is CudaLlama3RotaryEmbedding
    yarn = yarn_scaling_rope.YaRNScalingRotaryEmbedding(*first, 4.0, torch.float32)
    assert type(yarn) is CudaYaRNScalingRotaryEmbedding


def test_what_kernels_do_not_cover_is_vllms_own(config: VllmConfig) -> None:
    """Rows of float64, for one; on a CPU without the interpreter, everything."""
    x = torch.randn(3, 2 * HIDDEN, device=DEVICE, dtype=torch.float64)
    half = x[:, :HIDDEN]
    norm = RMSNorm(HIDDEN, dtype=torch.float64)
    rotary = RotaryEmbedding(HEAD, HEAD, 64, 10_000.0, False, torch.float64)
    positions = torch.arange(3, device=DEVICE)
    assert torch.equal(norm(half), norm.forward_native(half))
    assert torch.equal(SiluAndMul()(x), SiluAndMul.forward_native(x))
    for found, wanted in zip(
        rotary(positions, half, half[:, :HEAD]), rotary.forward_native(positions, half, half[:, :HEAD]), strict=True
    ):
        assert torch.equal(found, wanted)


def test_without_triton_vllms_own_layers_stay(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for layer in LAYERS:
        monkeypatch.delitem(cuda_layers.op_registry_oot, layer.__name__)
    monkeypatch.setattr(cuda_layers, "why_not_triton", lambda device: "triton cannot be imported: none here")
    register_cuda_layers()
    assert type(RMSNorm(HIDDEN)) is RMSNorm
