"""Rows rounded to 8-bit integers and their products, against Python's integers: the reference and the native kernel."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops.quantised import packed_layer
from tests.ops.rounded import ROUNDINGS, assert_near, spoilt_rows, weight_of
from vllm_gaudi_ucm.ops.cpu.native.call_graph.call_graph import Capture
from vllm_gaudi_ucm.ops.cpu.native.call_graph.memory import MemoryPool
from vllm_gaudi_ucm.ops.cpu.native.call_list import Call
from vllm_gaudi_ucm.ops.cpu.native.library import native
from vllm_gaudi_ucm.ops.quantised_linear.api import Target, choose_product
from vllm_gaudi_ucm.ops.quantised_linear.impl.cpu import int8 as cpu
from vllm_gaudi_ucm.ops.quantised_linear.impl.cpu.int8 import CpuInt8
from vllm_gaudi_ucm.ops.quantised_linear.rounding import joined, multiply_rounded, round_rows
from vllm_gaudi_ucm.ops.quantised_linear.weight import RowRounding

KERNELS = native()
needs_vnni = pytest.mark.skipif(
    KERNELS is None or not KERNELS.ucm_multiplies_int8(), reason="this CPU does not multiply 8-bit integers fast"
)
# also beyond the inputs that stay in the first cache, panels that end early, and inputs that do not fill four
SHAPES = [(33, 50), (64, 4), (200, 1001), (80, 512)]


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference(name: str, dtype: torch.dtype) -> None:
    weight, x = weight_of(name, 24, 70), spoilt_rows(9, 70, dtype)
    bias = torch.randn(24).to(dtype)
    assert_near(multiply_rounded(x, weight, bias), x, weight, bias)


@needs_vnni
@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 9, 20])
def test_the_native_kernel(name: str, dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    """Rows lie within a larger tensor of NaN."""
    outputs, inputs = shape
    weight = weight_of(name, outputs, inputs)
    product = CpuInt8(weight)
    layer = packed_layer(product, weight)
    whole = torch.full((rows, inputs + 3), torch.nan, dtype=dtype)
    x = whole[:, :inputs]
    x.copy_(spoilt_rows(rows, inputs, dtype))
    bias = torch.randn(outputs).to(dtype)
    assert_near(product.multiply(x, layer, bias), x, weight, bias)


@needs_vnni
def test_more_rows_than_pass_at_once_and_threads() -> None:
    weight = weight_of("each row, with zeros", 90, 40)
    product = CpuInt8(weight)
    layer = packed_layer(product, weight)
    x = torch.randn(1030, 40)
    expected, threads = multiply_rounded(x, weight), torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            found = product.multiply(x, layer, None)
        finally:
            torch.set_num_threads(threads)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(product.multiply(x.view(2, 515, 40), layer, None).flatten(0, 1), found)
    assert product.multiply(x[:0], layer, None).shape == (0, 90)


@needs_vnni
@pytest.mark.parametrize("name", ROUNDINGS)
def test_what_a_compiler_sees(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No native call, and the weight as it was packed."""
    weight = weight_of(name, 100, 35)
    product = CpuInt8(weight)
    layer = packed_layer(product, weight)
    found = product._unpacked(layer, 35)
    assert torch.equal(found.codes, weight.codes)
    monkeypatch.setattr(cpu, "native", lambda: pytest.fail("a native kernel"))
    x, bias = torch.randn(3, 35), torch.randn(100)
    compiled = torch.compile(lambda x: product.multiply(x, layer, bias), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), multiply_rounded(x, weight, bias))


@needs_vnni
def test_a_graph_of_native_calls_holds_it() -> None:
    weight = weight_of("fixed, with a zero", 48, 64)
    product = CpuInt8(weight)
    layer = packed_layer(product, weight)
    capture = Capture(MemoryPool(), {})
    x, bias = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(48, dtype=torch.bfloat16)
    capture.record(lambda: product.multiply(x, layer, bias))
    assert not capture.refused
    assert {type(one) for one in capture.recorded} == {Call}


def test_matrices_of_the_same_rows_share_a_range() -> None:
    """As vLLM's int8 kernels: the range of codes holds those of both."""
    assert joined(torch.tensor([0.1, 0.3]), None) == RowRounding(True, torch.tensor(0.3), None)
    scales, zeros = torch.tensor([0.1, 0.05]), torch.tensor([-100, 27], dtype=torch.int8)
    found = joined(scales, zeros)
    assert found.scale is not None
    assert found.zero is not None
    least, most = (float(found.scale) * (code - float(found.zero)) for code in (-128, 127))
    assert math.isclose(most, 22.7, rel_tol=0.02)
    assert math.isclose(least, -7.75, rel_tol=0.02)


def test_codes_and_their_ends() -> None:
    """Ties go to even; what is beyond a fixed range ends there."""
    rows = torch.tensor([[0.5, 1.5, -2.5, 1e30, -1e30, math.inf]])
    assert round_rows(rows, RowRounding(scale=torch.tensor(1.0))).codes.tolist() == [[0, 2, -2, 127, -128, 127]]
    spread = round_rows(torch.tensor([[-1.0, 0.0, 4.1]]), RowRounding(False))
    assert spread.codes.tolist() == [[-128, int(spread.zeros), 127]]


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows stay as they are without fast products of integers, for scales in blocks, and where no checkpoint rounds."""
    weight = weight_of("each row", 16, 32)
    assert not CpuInt8.covers(weight._replace(rounding=None))
    assert not CpuInt8.covers(weight._replace(block=(1, 16), scales=torch.ones(16, 2)))
    monkeypatch.setattr(cpu, "native", lambda: None)
    assert choose_product(weight, Target("cpu", torch.float32)) is None
